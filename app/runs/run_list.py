"""All runs of a home. They are read again once a second, so reading must be cheap.

A run that has ended is read again only if its files changed; the index keeps it between starts of
ltui. What takes long to read, disk use and settings, is read only if a list needs it, once for each
version of a run's files. There is no thread here: the home screen calls ``poll`` from its own
thread.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ltui.app.runs.run_entry import DAMAGED, MetricValues, RunEntry, head_document, summarise
from ltui.app.runs.run_fields import SETTING
from ltui.app.runs.run_index import IndexedRun, RunIndex, Stamped
from ltui.training.json_codec import WRONG_CONTENT
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import HEAD_FIELDS, LIVE, RunSnapshot
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir, disk_use
from ltui.widgets.sanitise import clean_name

SETTLED_S = 2.0
"""Seconds after which a change of a file gives it another time, on coarse clocks, too. A run that
has changed within them is read again."""
_FILES = (
    *("spec.yaml", "run.db", "run.db-wal", "supervisor.lock", RunDir.LABELS_NAME),
    *("slurm", "checkpoints", "queued.json"),
)
"""Files of a run that change whenever the run does, and folders whose files come and go then. The
specification is the first one."""
SIZES, SETTINGS, GOODPUT = "size", "settings", "goodput"
"""The kinds of slow values."""
_FIELD_OF = {SIZES: "size_bytes", SETTINGS: "settings", GOODPUT: "goodput"}
"""The field of an entry with the values of a kind."""
LIVE_READ_S = {SIZES: 60.0, SETTINGS: 5.0, GOODPUT: 60.0}
"""Seconds after which a value of a live run is read again."""
_SETTINGS_FILES = 3
"""Number of words of a stamp with the files that settings are in: specification and history."""


def read_settings(run_dir: RunDir) -> dict[str, str]:
    """Return the settings of a run; none if its specification cannot be read."""
    # Imported here: only a list that needs settings reads a history, with NumPy, and YAML.
    from ltui.app.presentation.run_configuration import run_settings
    from ltui.training.store.history_reader import RunStore

    reported: Mapping[str, Any] = {}
    # Files that were edited by hand may hold anything.
    with suppress(*WRONG_CONTENT), RunStore(run_dir) as store:
        reported = store.hyperparameters()
    try:
        return _shared(run_settings(run_dir.read_spec(), reported))
    except WRONG_CONTENT:
        return {}


def _checked(kind: str, value: Any) -> Any:
    """Return a value of the index; None if it is damaged."""
    if kind == SETTINGS:
        return _shared(value) if isinstance(value, dict) else None
    return value if isinstance(value, float) else None


def _shared(settings: Mapping[Any, Any]) -> dict[str, str]:
    """Return settings whose texts share their memory with those of other runs."""
    return {sys.intern(str(name)): sys.intern(str(value)) for name, value in settings.items()}


def recovered_snapshot(run_dir: RunDir) -> RunSnapshot:
    """Return ``current_snapshot`` of a run that the index does not hold."""
    # Imported here because a list of ended runs needs none of it, and it takes 0.15 s.
    from ltui.training.lifecycle.run_status import current_snapshot

    return current_snapshot(run_dir)


class RunList:
    """Reads all runs in a home directory. To be used by one thread at a time."""

    def __init__(
        self, home: Path, snapshot_of: Callable[[RunDir], RunSnapshot] = recovered_snapshot
    ) -> None:
        self._home, self._snapshot_of = home, snapshot_of
        self._index = RunIndex(home)
        self._ended = self._index.read()
        self._heads: dict[str, str] | None = None
        self._stamps: dict[str, str] = {}
        self._listed: dict[str, RunEntry] = {}
        """The runs of the last ``poll`` by id."""
        self._slow_values: dict[str, dict[str, Stamped]] = {}
        """What is known of the slow values, by kind and run."""
        self._read_at: dict[tuple[str, str], float] = {}
        """Time of the monotonic clock at which such a value was read, by kind and run."""
        self._completed: dict[str, tuple[RunEntry, frozenset[str], RunEntry]] = {}
        """An entry as it was given, the kinds that were added to it, and the result, by run."""
        self.unread = 0
        """Number of runs that the last ``poll`` did not read, because its time was over."""
        self.incomplete = 0
        """Number of runs without all the values that the last ``complete`` was asked for."""

    def close(self) -> None:
        self._index.close()

    def poll(self, limit_s: float | None = None) -> tuple[RunEntry, ...]:
        """Return live runs first, then the others, each group with the latest run first.

        With ``limit_s``, runs that are not in the index are not read when so many seconds are over;
        the next call continues with them. Those of them that were listed before stay as they were,
        so that no run vanishes from under a cursor.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        entries: list[RunEntry] = []
        changed: list[IndexedRun] = []
        self.unread = 0
        found = _scan(self._home)
        for run_id, stamp, is_settled in found:
            known = self._ended.get(run_id)
            if known is not None and known.stamp == stamp:
                entries.append(known.entry)
            elif deadline is not None and changed and time.monotonic() > deadline:
                self.unread += 1
                entries += [self._listed[run_id]] if run_id in self._listed else []
            else:
                read = self._read(run_id, stamp)
                entries.append(read.entry)
                if not read.entry.live and is_settled:
                    self._ended[run_id] = IndexedRun(stamp, read.entry)
                    changed.append(read)
        self._stamps = {run_id: stamp for run_id, stamp, _ in found}
        gone = self._ended.keys() - self._stamps.keys()
        for run_id in gone:
            del self._ended[run_id]
            self._completed.pop(run_id, None)
            for kind, values in self._slow_values.items():
                values.pop(run_id, None)
                self._read_at.pop((kind, run_id), None)
        self._index.write(changed, gone)
        self._listed = {entry.id: entry for entry in entries}
        return tuple(sorted(entries, key=lambda entry: not entry.live))

    def complete(
        self, entries: Sequence[RunEntry], names: Iterable[str], limit_s: float | None = None
    ) -> tuple[RunEntry, ...]:
        """Return runs of the last ``poll`` with what the fields of these names need: disk use,
        settings and goodput take long to read.

        With ``limit_s``, runs lack what was not read when so many seconds are over; the next call
        continues with them.
        """
        kinds = frozenset(
            name if name in (SIZES, GOODPUT) else SETTINGS
            for name in names
            if name in (SIZES, GOODPUT) or name.startswith(SETTING)
        )
        self.incomplete = 0
        if not kinds:
            return tuple(entries)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for kind in kinds - self._slow_values.keys():
            self._slow_values[kind] = {
                run_id: Stamped(stored.stamp, value)
                for run_id, stored in self._index.read_values(kind).items()
                if (value := _checked(kind, stored.value)) is not None
            }
        completed = []
        read: dict[str, dict[str, Stamped]] = {kind: {} for kind in kinds}
        for entry in entries:
            before, had, result = self._completed.get(entry.id, (None, kinds, entry))
            if before is not entry or had != kinds:
                values = {kind: self._slow_value(kind, entry, deadline, read) for kind in kinds}
                known = {
                    _FIELD_OF[kind]: value for kind, value in values.items() if value is not None
                }
                result = replace(entry, **known)
                if len(known) < len(kinds):
                    self.incomplete += 1
                elif not entry.live:
                    self._completed[entry.id] = entry, kinds, result
            completed.append(result)
        for kind, values_read in read.items():
            self._index.write_values(kind, values_read)
        return tuple(completed)

    def _slow_value(
        self,
        kind: str,
        entry: RunEntry,
        deadline: float | None,
        read: dict[str, dict[str, Stamped]],
    ) -> Any:
        """Return a value that is known, or read it; None if the time is over."""
        stamp = self._stamps[entry.id]
        if kind == SETTINGS:
            stamp = " ".join(stamp.split(" ")[:_SETTINGS_FILES])
        stored, now = self._slow_values[kind].get(entry.id), time.monotonic()
        is_recent = (
            entry.live
            and now - self._read_at.get((kind, entry.id), -math.inf) < (LIVE_READ_S[kind])
        )
        if stored is not None and (stored.stamp == stamp or is_recent):
            return stored.value
        if deadline is not None and now > deadline:
            return None
        self._read_at[kind, entry.id] = now
        value: Any
        if kind == SIZES:
            value = float(disk_use(entry.run_dir.path))
        elif kind == GOODPUT:
            value = self._goodput(entry)
        else:
            value = read_settings(entry.run_dir)
        stored = self._slow_values[kind][entry.id] = Stamped(stamp, value)
        if not entry.live:
            read[kind][entry.id] = stored
        return value

    def _goodput(self, entry: RunEntry) -> float:
        """Return the goodput of a run; NaN if it is not known."""
        # Imported here, as what reads settings.
        from ltui.app.live.run_time import read_time

        with suppress(OSError, sqlite3.Error, *WRONG_CONTENT):
            snapshot = entry.snapshot or self._snapshot_of(entry.run_dir)
            goodput = read_time(entry.run_dir, snapshot).ledger.goodput
            return math.nan if goodput is None else goodput
        return math.nan

    def head(self, entry: RunEntry) -> str:
        """Return the run's part of ``ltui runs --json`` without its labels, as JSON."""
        if entry.snapshot is not None:
            return json.dumps(head_document(entry.snapshot))
        if entry.problem is not None:
            problem = {
                **dict.fromkeys((*HEAD_FIELDS, "state_word")),
                "id": entry.id,
                "name": entry.name,
                "run_dir": str(entry.run_dir.path),
                "state": DAMAGED,
                "state_word": DAMAGED,
                "detail": entry.problem,
            }
            return json.dumps(problem)
        if self._heads is None:
            self._heads = self._index.heads()
        head = self._heads.get(entry.id)
        return head or json.dumps(head_document(self._snapshot_of(entry.run_dir)))

    def _read(self, run_id: str, stamp: str) -> IndexedRun:
        run_dir = RunDir(self._home / "runs" / run_id)
        if not run_id.isprintable():
            problem = "the name of its directory holds characters that cannot be printed."
            return IndexedRun(stamp, RunEntry(run_dir=run_dir, problem=problem))
        labels = read_labels(run_dir)
        try:
            run = self._snapshot_of(run_dir)
            entry = RunEntry(
                run_dir=run_dir,
                summary=summarise(run),
                labels=labels,
                metrics=MetricValues.of(run.metrics),
                snapshot=run if run.state in LIVE else None,
            )
            return IndexedRun(stamp, entry, head_document(run))
        except ProblemError as error:
            problem = error.problems[0].what
        except (OSError, sqlite3.Error, *WRONG_CONTENT) as error:
            # The files of one run must not hide the others, whatever they hold.
            problem = f"its files cannot be read ({error or type(error).__name__})."
        problem = clean_name(problem, 300)
        return IndexedRun(stamp, RunEntry(run_dir=run_dir, labels=labels, problem=problem))


def _scan(home: Path) -> list[tuple[str, str, bool]]:
    """Return id, stamp and whether it is settled of each run, the last launched one first."""
    latest = time.time_ns() - int(SETTLED_S * 1e9)
    runs: list[tuple[int, str, str, bool]] = []
    try:
        names = os.listdir(home / "runs")
    except OSError:
        return []
    for name in names:
        folder = f"{home}/runs/{name}/"
        if name.startswith("."):
            continue
        stamp, newest, launched = [], 0, None
        for file in _FILES:
            try:
                status = os.stat(folder + file)
            except OSError:
                if launched is None:
                    break
                stamp.append("-")
                continue
            if launched is None:
                launched = status.st_mtime_ns
            if not status.st_size:
                # A reader leaves an empty log of the database.
                stamp.append("-")
            else:
                # The time of the change, which a copied or restored file has, too.
                stamp.append(f"{status.st_ctime_ns}:{status.st_size}")
                newest = max(newest, status.st_ctime_ns)
        if launched is not None:
            runs.append((-launched, name, " ".join(stamp), newest < latest))
    return [(name, stamp, is_settled) for _, name, stamp, is_settled in sorted(runs)]
