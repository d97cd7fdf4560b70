"""The list of runs for the home screen. It is read once a second, so reading must be cheap.

A run that has ended is read again only if its files changed. There is no thread here: the home
screen calls ``poll`` from its own thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.history_place import history_file
from ltui.training.store.run_directory import RunDir, list_runs


@dataclass(frozen=True, slots=True)
class RunListEntry:
    """A run and its latest snapshot."""

    run_dir: RunDir
    snapshot: RunSnapshot | None
    problem: str | None = None
    """The reason why there is no snapshot."""

    @property
    def id(self) -> str:
        return self.run_dir.id

    @property
    def live(self) -> bool:
        return self.snapshot is not None and self.snapshot.state in LIVE


class RunList:
    """Reads all runs in a home directory. To be used by one thread."""

    def __init__(self, home: Path, snapshot_of: Callable[[RunDir], RunSnapshot]) -> None:
        self._home, self._snapshot_of = home, snapshot_of
        self._cache: dict[str, tuple[tuple[int, ...], RunListEntry]] = {}

    def poll(self) -> tuple[RunListEntry, ...]:
        """Return live runs first, then the others, each group with the latest run first."""
        entries = [self._entry(run_dir) for run_dir in list_runs(self._home)]
        self._cache = {entry.id: self._cache[entry.id] for entry in entries}
        return tuple(sorted(entries, key=lambda entry: not entry.live))

    def _entry(self, run_dir: RunDir) -> RunListEntry:
        stamp = _file_stamp(run_dir)
        cached = self._cache.get(run_dir.id)
        if cached is not None and cached[0] == stamp and not cached[1].live:
            return cached[1]
        entry = self._read(run_dir)
        self._cache[run_dir.id] = (stamp, entry)
        return entry

    def _read(self, run_dir: RunDir) -> RunListEntry:
        try:
            return RunListEntry(run_dir, self._snapshot_of(run_dir))
        except ProblemError as error:
            return RunListEntry(run_dir, None, error.problems[0].what)
        except (OSError, ValueError) as error:
            return RunListEntry(run_dir, None, str(error))


def _file_stamp(run_dir: RunDir) -> tuple[int, ...]:
    """Return times and sizes of a run's files, which change whenever the run does."""
    values = []
    history = history_file(run_dir).path
    wal = history.with_name(history.name + "-wal")
    for path in (history, wal, run_dir.lock_path, run_dir.spec_path):
        try:
            status = os.stat(path)
            values += [status.st_mtime_ns, status.st_size]
        except OSError:
            values += [0, 0]
    return tuple(values)
