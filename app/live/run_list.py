"""Every run as one line of the home screen; looked at once a second, so it must be cheap.

A run that has ended is read again only where its files changed. No thread here: home asks from one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RankState, RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir, list_runs


@dataclass(frozen=True, slots=True)
class RunListEntry:
    """A run and what is known of it."""

    run_dir: RunDir
    snapshot: RunSnapshot | None
    problem: str | None = None
    """Why there is no snapshot."""

    @property
    def id(self) -> str:
        return self.run_dir.path.name

    @property
    def live(self) -> bool:
        return self.snapshot is not None and self.snapshot.state in LIVE


class RunList:
    """Looks at all runs below a home; used by one thread."""

    def __init__(self, home: Path, snapshot_of: Callable[[RunDir], RunSnapshot]) -> None:
        self._home, self._snapshot_of = home, snapshot_of
        self._known: dict[str, tuple[tuple[int, ...], RunListEntry]] = {}

    def poll(self) -> tuple[RunListEntry, ...]:
        """Live runs first, then the others, each the latest first."""
        lines = [self._line(run_dir) for run_dir in list_runs(self._home)]
        self._known = {k: v for k, v in self._known.items() if any(line.id == k for line in lines)}
        return tuple(sorted(lines, key=lambda line: not line.live))

    def _line(self, run_dir: RunDir) -> RunListEntry:
        stamp = _file_stamp(run_dir)
        known = self._known.get(run_dir.path.name)
        if known is not None and known[0] == stamp and not known[1].live:
            return known[1]
        line = self._read(run_dir)
        self._known[run_dir.path.name] = (stamp, line)
        return line

    def _read(self, run_dir: RunDir) -> RunListEntry:
        try:
            return RunListEntry(run_dir, self._snapshot_of(run_dir))
        except ProblemError as error:
            return RunListEntry(run_dir, None, error.problems[0].what)
        except (OSError, ValueError) as error:
            return RunListEntry(run_dir, None, str(error))


def _file_stamp(run_dir: RunDir) -> tuple[int, ...]:
    """Changes whenever a run's files do."""
    found = []
    wal = run_dir.db_path.with_name(run_dir.db_path.name + "-wal")
    for path in (run_dir.db_path, wal, run_dir.lock_path, run_dir.spec_path):
        try:
            status = os.stat(path)
            found += [status.st_mtime_ns, status.st_size]
        except OSError:
            found += [0, 0]
    return tuple(found)


def rank_problem(snapshot: RunSnapshot) -> str | None:
    """``rank 2 stalled 8 s``: what makes a live run worth opening."""
    if snapshot.state not in LIVE or snapshot.state is RunState.PAUSED:
        return None
    for state in (RankState.DEAD, RankState.STALLED):
        ranks = [r for r in snapshot.ranks if r.state is state]
        if ranks:
            return f"rank {', '.join(str(r.rank) for r in ranks[:4])} {state.value}"
    return None
