"""Writer of a run's history: one transaction per tick for new rows and queue cursors together.

Only the supervisor writes. A cursor is stored in the same transaction as the rows that it counts,
so a supervisor that recovers the run neither loses nor repeats a record. Disk errors are raised as
``sqlite3.Error``; the caller continues without the history.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ltui.training.json_codec import to_json
from ltui.training.state.gpu_values import GPU_READINGS
from ltui.training.state.metric_name_patterns import TRAIN_LOSS, is_training_loss
from ltui.training.state.run_snapshot import Event, GpuSnapshot, RunSnapshot, RunState, Verdict
from ltui.training.store.database_schema import STEP_COLUMNS, open_for_writing
from ltui.training.store.history_queries import (
    Span,
    StoredValues,
    logs_step_loss,
    spans,
    stored_values,
)
from ltui.training.store.history_windows import SAMPLES, STEPS, SeriesWindows

KEEP_ROWS = 200_000
"""Number of newest rows kept at full resolution for each rank, and for each metric of a rank."""
KEEP_WINDOWS = 200_000
"""Number of newest windows kept at each level that a coarser level also covers."""
KEEP_READINGS_S = 6 * 3600.0
"""Seconds for which GPU and process readings are kept."""


def _insert(table: str, *columns: str) -> str:
    """Return the statement that inserts a row, unless the table has one with its key."""
    marks = ", ".join("?" * len(columns))
    return f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608


_INSERT_ATTEMPT = _insert(
    "attempts", "attempt", "started_at", "state", "resumed_path", "resumed_step", "boot_id",
    "changes", "reason", "parent",
)  # fmt: skip
_INSERT_STEP = _insert("steps", "attempt", "rank", "seq", *STEP_COLUMNS)
_INSERT_SAMPLE = _insert(
    "samples", "attempt", "rank", "name_id", "seq", "step", "epoch", "t", "value",
    "n", "low", "high", "last", "first_step",
)  # fmt: skip
_ONE_VALUE = (None,) * 5
"""The last columns of a sample that is one logged value."""
_INSERT_EVENT = _insert("events", "attempt", "rank", "seq", "t", "kind", "text", "data")
_INSERT_GPU = _insert("gpu_samples", "gpu", "t", *GPU_READINGS)
_INSERT_PROCESS = _insert("process_samples", "attempt", "rank", "t", "cpu_percent", "rss_bytes")


class Cursor(Struct, frozen=True):
    """Position in one rank's queue up to which records are stored."""

    next_seq: int
    """Sequence number of the next record; it does not restart when a rank gets a new queue file."""
    base: int = 0
    """Number that is added to the sequence numbers of the current queue file."""
    inode: int = 0
    """Inode of the current queue file."""
    combined: int = 0
    """Number of logged values that the rank has combined with others."""


class CombinedSample(Struct, frozen=True):
    """Logged values of one metric that a rank has combined."""

    rank: int
    seq: int
    name: str
    first_step: int
    step: int
    epoch: int | None
    t: float
    """Unix time of the last value."""
    count: int
    mean: float
    low: float
    high: float
    last: float


Sample = tuple[int, int, str, int | None, int | None, float, float]
"""(rank, seq, name, step, epoch, unix time, value)"""


class Batch(Struct):
    """New rows of one tick."""

    steps: list[tuple[int, int, Sequence[float]]] = field(default_factory=list)
    """(rank, seq, the values of ``StepField``)"""
    samples: list[Sample] = field(default_factory=list)
    combined: list[CombinedSample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    gaps: list[tuple[int, int, int, float, str]] = field(default_factory=list)
    """(rank, seq of the first record after the gap, records missed, unix time, reason)"""
    cursors: dict[int, Cursor] = field(default_factory=dict)
    gpus: Sequence[GpuSnapshot] = ()
    processes: list[tuple[int, float, float | None, int | None]] = field(default_factory=list)
    """(rank, unix time, CPU percent, resident bytes)"""

    def __bool__(self) -> bool:
        return any(
            (self.steps, self.samples, self.combined, self.events, self.gaps, self.gpus,
             self.processes)
        )  # fmt: skip


class StoreWriter:
    """The only writer of one run's database."""

    def __init__(self, path: Path, *, keep_rows: int = KEEP_ROWS) -> None:
        self._connection = open_for_writing(path)
        self._keep_rows = keep_rows
        self._names = self._read_names()
        self._windows: dict[tuple[int, ...], SeriesWindows] = {}
        self._pruned_at = 0.0

    def close(self) -> None:
        self._connection.close()

    @property
    def copy_note(self) -> str | None:
        """Why the copy in the run directory is old; None if it is not, or if there is none."""
        return None

    # -- attempts and states -------------------------------------------------------------------

    def last_attempt(self) -> int:
        """Return the number of the last attempt; 0 if there is none."""
        return int(self._value("SELECT max(attempt) FROM attempts") or 0)

    def _value(self, query: str, *parameters: int | None) -> Any:
        """Return the first column of the first row; None if there is no row."""
        row = self._connection.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    def begin_attempt(
        self,
        attempt: int,
        *,
        started_at: float,
        boot_id: str | None,
        resumed_path: str | None,
        resumed_step: int | None,
        changes: Sequence[str] = (),
        reason: str | None = None,
        parent: int | None = None,
    ) -> None:
        """Record the start of an attempt.

        ``changes`` are the settings that ``--set`` changed since the previous attempt. ``reason``
        is given for an automatic restart. ``parent`` is the attempt that saved the checkpoint.
        """
        self._connection.execute(
            _INSERT_ATTEMPT,
            (
                attempt, started_at, RunState.STARTING.value, resumed_path, resumed_step, boot_id,
                json.dumps(list(changes)), reason, parent,
            ),
        )  # fmt: skip

    def start_reason(self, attempt: int) -> tuple[tuple[str, ...], str | None]:
        """Return ``changes`` and ``reason`` as given to ``begin_attempt``."""
        row = self._connection.execute(
            "SELECT changes, reason FROM attempts WHERE attempt = ?", (attempt,)
        ).fetchone()
        return ((), None) if row is None else (tuple(json.loads(row[0] or "[]")), row[1])

    def started_at(self, attempt: int) -> float | None:
        started: float | None = self._value(
            "SELECT started_at FROM attempts WHERE attempt = ?", attempt
        )
        return started

    def resumed_path(self, attempt: int) -> Path | None:
        """Return the checkpoint from which the attempt resumed."""
        path = self._value("SELECT resumed_path FROM attempts WHERE attempt = ?", attempt)
        return Path(path) if path else None

    def set_resumed_step(self, attempt: int, step: int) -> None:
        self._connection.execute(
            "UPDATE attempts SET resumed_step = ? WHERE attempt = ?", (step, attempt)
        )

    def set_state(
        self, attempt: int, t: float, state: RunState, detail: str | None, exit_code: int | None
    ) -> None:
        """Record a change of state; the attempt keeps its last state and ``exit_code``."""
        with _transaction(self._connection):
            self._connection.execute(
                "INSERT INTO states (attempt, t, state, detail) VALUES (?, ?, ?, ?)",
                (attempt, t, state.value, detail),
            )
            self._connection.execute(
                "UPDATE attempts SET state = ?, detail = ?, exit_code = ? WHERE attempt = ?",
                (state.value, detail, exit_code, attempt),
            )

    def end_attempt(self, attempt: int, t: float) -> None:
        self._connection.execute("UPDATE attempts SET ended_at = ? WHERE attempt = ?", (t, attempt))

    def ended_attempts(self) -> list[int]:
        """Return the attempts whose end is recorded."""
        rows = self._connection.execute("SELECT attempt FROM attempts WHERE ended_at IS NOT NULL")
        return [attempt for (attempt,) in rows]

    def cursors(self, attempt: int) -> dict[int, Cursor]:
        """Return the stored queue position of each rank."""
        rows = self._connection.execute(
            "SELECT rank, next_seq, base, inode, coalesce(combined, 0) FROM cursors "
            "WHERE attempt = ?",
            (attempt,),
        )
        return {rank: Cursor(*cursor) for rank, *cursor in rows}

    def missed(self) -> int:
        """Return the number of records of all ranks and attempts that are lost."""
        return int(self._value("SELECT sum(missed) FROM gaps WHERE rank IS NOT NULL") or 0)

    def combined(self) -> int:
        """Return the number of logged values of all ranks and attempts that were combined."""
        return int(self._value("SELECT sum(combined) FROM cursors") or 0)

    def missing_parts(self) -> list[str]:
        """Return descriptions of missing parts for which no number of records is known."""
        rows = self._connection.execute("SELECT reason FROM gaps WHERE rank IS NULL ORDER BY id")
        return [row[0] for row in rows]

    def record_missing_part(self, attempt: int, reason: str) -> None:
        """Record that a part of the history is missing, and which."""
        self._connection.execute(
            "INSERT INTO gaps (attempt, rank, after_seq, missed, t, reason) "
            "VALUES (?, NULL, 0, 0, ?, ?)",
            (attempt, time.time(), reason),
        )

    def last_step(self) -> int:
        """Return the highest step of any rank and attempt; 0 if there is none."""
        return int(
            self._value(
                "SELECT max((SELECT coalesce(max(step), 0) FROM steps), "
                "(SELECT coalesce(max(last_step), 0) FROM step_windows))"
            )
        )

    def spans(self, begun: int | None) -> list[Span]:
        """Return the attempts with steps that count; ``begun`` counts as if it had trained."""
        return spans(self._connection, begun)

    def stored_values(self, spans: Sequence[Span]) -> StoredValues:
        """Return the last and best values of each metric over these steps."""
        return stored_values(self._connection, spans)

    def has_trained(self, attempt: int | None = None) -> bool:
        """Return whether an attempt, or any attempt, has stored steps."""
        query = "SELECT EXISTS (SELECT 1 FROM steps WHERE attempt = coalesce(?, attempt))"
        return bool(self._value(query, attempt))

    def has_logged(self, attempt: int) -> bool:
        """Return whether an attempt has stored values that the program logs."""
        return bool(self._value("SELECT EXISTS (SELECT 1 FROM samples WHERE attempt = ?)", attempt))

    def logs_step_loss(self, *, default: bool) -> bool:
        """Return whether the program logs the loss of each step; ``default`` on an error.

        True while no loss is logged, too.
        """
        if not any(name != TRAIN_LOSS and is_training_loss(name) for name in self._names):
            return True
        try:
            return logs_step_loss(self._connection)
        except (sqlite3.Error, ValueError):
            return default

    def snapshot_document(self) -> str | None:
        """Return the stored snapshot as JSON; None if there is none."""
        document = self._value("SELECT document FROM snapshot")
        return None if document is None else str(document)

    def write_snapshot(self, snapshot: RunSnapshot) -> None:
        """Replace the stored snapshot."""
        self._connection.execute(
            "INSERT OR REPLACE INTO snapshot (id, taken_at, document) VALUES (1, ?, ?)",
            (snapshot.taken_at, json.dumps(to_json(snapshot), separators=(",", ":"))),
        )

    def write_verdict(self, attempt: int, verdict: Verdict) -> None:
        """Store a verdict, or update its end and cause if it is already stored."""
        self._connection.execute(
            "INSERT INTO verdicts (attempt, began, ended, kind, level, cause, document) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (attempt, kind, began) "
            "DO UPDATE SET ended = excluded.ended, cause = excluded.cause, "
            "document = excluded.document",
            (
                attempt, verdict.began, verdict.ended, verdict.kind, verdict.level, verdict.cause,
                json.dumps(to_json(verdict), separators=(",", ":")),
            ),
        )  # fmt: skip

    # -- records -------------------------------------------------------------------------------

    def commit(self, attempt: int, batch: Batch, snapshot: RunSnapshot | None = None) -> None:
        """Write the batch, its cursors and the snapshot in one transaction."""
        try:
            with _transaction(self._connection):
                self._insert(attempt, batch)
                self._connection.executemany(
                    "INSERT OR REPLACE INTO cursors "
                    "(attempt, rank, next_seq, base, inode, combined) VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (attempt, rank, c.next_seq, c.base, c.inode, c.combined)
                        for rank, c in batch.cursors.items()
                    ],
                )
                self._close_windows(attempt, batch)
                if snapshot is not None:
                    self.write_snapshot(snapshot)
        except sqlite3.Error:
            # The rollback also removed names and windows that were added in the transaction.
            self._windows.clear()
            self._names = self._read_names()
            raise

    def _read_names(self) -> dict[str, int]:
        rows = self._connection.execute("SELECT id, name FROM names")
        return {name: number for number, name in rows}

    def _insert(self, attempt: int, batch: Batch) -> None:
        db = self._connection
        db.executemany(
            _INSERT_STEP, [_step_row(attempt, rank, seq, v) for rank, seq, v in batch.steps]
        )
        db.executemany(
            _INSERT_SAMPLE,
            [
                (attempt, rank, self._name_id(name), seq, step or 0, epoch, t, _none_for_nan(value),
                 *_ONE_VALUE)
                for rank, seq, name, step, epoch, t, value in batch.samples
            ],
        )  # fmt: skip
        db.executemany(
            _INSERT_SAMPLE,
            [
                (attempt, c.rank, self._name_id(c.name), c.seq, c.step, c.epoch, c.t,
                 *map(_none_for_nan, (c.mean, c.count, c.low, c.high, c.last)), c.first_step)
                for c in batch.combined
            ],
        )  # fmt: skip
        db.executemany(
            _INSERT_EVENT,
            [
                (attempt, e.rank, e.seq, e.t, e.kind, e.text, json.dumps(to_json(dict(e.data))))
                for e in batch.events
            ],
        )
        db.executemany(
            "INSERT INTO gaps (attempt, rank, after_seq, missed, t, reason) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            [(attempt, *gap) for gap in batch.gaps],
        )
        db.executemany(
            _INSERT_GPU,
            [
                (gpu.number, gpu.sampled_at, *(getattr(gpu, name) for name in GPU_READINGS))
                for gpu in batch.gpus
                if gpu.sampled_at is not None
            ],
        )
        db.executemany(_INSERT_PROCESS, [(attempt, *row) for row in batch.processes])

    def drop_old_readings(self, now: float) -> None:
        """Delete readings older than ``KEEP_READINGS_S``, at most once a minute."""
        if 0.0 <= now - self._pruned_at < 60.0:
            return
        self._pruned_at = now
        for table in ("gpu_samples", "process_samples"):
            self._connection.execute(
                f"DELETE FROM {table} WHERE t < ?",  # noqa: S608
                (now - KEEP_READINGS_S,),
            )

    def _name_id(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            row = self._connection.execute(
                "INSERT INTO names (name) VALUES (?) ON CONFLICT (name) DO UPDATE SET name = name "
                "RETURNING id",
                (name,),
            ).fetchone()
            number = self._names[name] = int(row[0])
        return number

    # -- windows -------------------------------------------------------------------------------

    def _close_windows(self, attempt: int, batch: Batch) -> None:
        new_steps: dict[tuple[int, ...], list[int]] = {}
        for rank, _, values in batch.steps:
            new_steps.setdefault((attempt, rank), []).append(_int_or_zero(values[0]))
        by_name: dict[tuple[int, str], list[int]] = {}
        for rank, _, name, step, _, _, _ in batch.samples:
            by_name.setdefault((rank, name), []).append(step or 0)
        for (rank, name), steps in by_name.items():
            new_steps[attempt, rank, self._name_id(name)] = steps
        for c in batch.combined:
            new_steps.setdefault((attempt, c.rank, self._name_id(c.name)), []).append(c.step)
        for key, series_steps in new_steps.items():
            windows = self._windows.get(key)
            if windows is None:
                tables = STEPS if len(key) == 2 else SAMPLES
                windows = self._windows[key] = SeriesWindows(self._connection, tables, key)
            windows.add(max(0, *series_steps), len(series_steps))
            windows.drop_old(self._keep_rows, KEEP_WINDOWS)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the statements of the block, or roll back if an exception is raised."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # On a full disk SQLite has already rolled back.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _int_or_zero(value: float) -> int:
    return _int_or_none(value) or 0


def _int_or_none(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _none_for_nan(value: float) -> float | None:
    """Return None for NaN, which SQLite stores as NULL anyway; infinities are stored."""
    return None if math.isnan(value) else value


def _step_row(attempt: int, rank: int, seq: int, values: Sequence[float]) -> tuple[Any, ...]:
    position: tuple[int, int | None, int | None]
    try:
        position = (int(values[0]), int(values[1]), int(values[2]))
    except (ValueError, OverflowError):  # A program without Lightning has no epochs and batches.
        position = (_int_or_zero(values[0]), _int_or_none(values[1]), _int_or_none(values[2]))
    return (attempt, rank, seq, *position, *values[3 : len(STEP_COLUMNS)])
