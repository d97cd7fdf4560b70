"""All runs of a home. They are read again once a second, so reading must be cheap.

A run that has ended is read again only if its files changed; the index keeps it between starts of
ltui. There is no thread here: the home screen calls ``poll`` from its own thread.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ltui.app.runs.run_entry import DAMAGED, RunEntry
from ltui.app.runs.run_index import IndexedRun, RunIndex
from ltui.app.runs.run_json import head_document
from ltui.app.runs.run_summary import MetricValues, summarise
from ltui.app.runs.slow_values import SlowValues, slow_kinds
from ltui.training.json_codec import WRONG_CONTENT
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import HEAD_FIELDS, LIVE, RunSnapshot
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_name

SETTLED_S = 2.0
"""Seconds after which a change of a file gives it another time, on coarse clocks, too. A run that
has changed within them is read again."""
_FILES = (
    *("spec.yaml", "run.db", "run.db-wal", "supervisor.lock", RunDir.LABELS_NAME),
    *("slurm", "checkpoints"),
)
"""Files of a run that change whenever the run does, and folders whose files come and go then. The
specification is the first one."""


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
        self._slow_values = SlowValues(self._index)
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
        self._slow_values.forget(gone)
        self._index.write(changed, gone)
        self._listed = {entry.id: entry for entry in entries}
        return tuple(sorted(entries, key=lambda entry: not entry.live))

    def complete(
        self, entries: Sequence[RunEntry], names: Iterable[str], limit_s: float | None = None
    ) -> tuple[RunEntry, ...]:
        """Return runs of the last ``poll`` with what the fields of these names need: disk use and
        settings take long to read.

        With ``limit_s``, runs lack what was not read when so many seconds are over; the next call
        continues with them.
        """
        completed, self.incomplete = self._slow_values.add(
            entries, self._stamps, slow_kinds(names), limit_s
        )
        return completed

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
