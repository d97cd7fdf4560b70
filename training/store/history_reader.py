"""Reader of a run's history, also while it is written: curves, events, readings, export rows.

It opens ``run.db`` read-only and never blocks the writer. It raises ``StoreError`` if the file is
damaged or was written by a newer ltui.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ltui.training.state.json_decoder import from_json
from ltui.training.state.metric_names import TRAIN_LOSS
from ltui.training.state.run_snapshot import RunSnapshot, Verdict, snapshot_from_json
from ltui.training.store.attempt_lineage import Span, spans
from ltui.training.store.database_schema import (
    check_layout,
    damaged_error,
    no_history_error,
    store_error,
)
from ltui.training.store.export_rows import ExportRow, Series, export_rows
from ltui.training.store.history_windows import SAMPLES, STEPS, WINDOW_SIZES, TablePair
from ltui.training.store.run_directory import RunDir

FloatArray = npt.NDArray[np.float64]

STEP_SERIES = {
    TRAIN_LOSS: "loss",
    "step/loss": "loss",
    "step/seconds": "step_s",
    "step/fetch_seconds": "fetch_s",
    "step/samples": "samples",
    "step/lr": "lr",
}
"""Series that every step has, independent of what the user logs: name -> column of ``steps``."""

ROW_SERIES = {
    "step/forward_seconds": "forward_s",
    "step/backward_seconds": "backward_s",
    "step/optimizer_seconds": "optimizer_s",
    "step/memory_bytes": "memory_bytes",
}
"""Series without windows, which exist only for the newest steps: name -> column of ``steps``."""

_MAX_POINTS_READ = 20_000
"""Maximum number of points of a curve; it decides at which resolution the curve is read."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One series over steps. All arrays have the same length; missing values are NaN."""

    steps: FloatArray
    epochs: FloatArray
    times: FloatArray
    """Unix seconds."""
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    count: FloatArray
    """Number of logged values that each point represents."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event of the run's history."""

    id: int
    attempt: int
    rank: int | None
    t: float
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of the run's state at unix time ``t``."""

    attempt: int
    t: float
    state: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class Gap:
    """Records that are missing from the history."""

    attempt: int
    rank: int | None
    """None if a part of the history of all ranks is missing."""
    after_seq: int
    missed: int
    t: float
    reason: str


@dataclass(frozen=True, slots=True)
class StoredGpuReadings:
    """Stored readings of one GPU, oldest first; missing values are NaN."""

    times: FloatArray
    utilisation_percent: FloatArray
    memory_used_bytes: FloatArray
    power_w: FloatArray
    temperature_c: FloatArray


_Result = TypeVar("_Result")


def _raises_store_error(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make a method raise ``StoreError`` if SQLite reports an error."""

    @wraps(method)
    def wrapper(self: RunStore, *args: Any, **kwargs: Any) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except sqlite3.DatabaseError as error:
            raise damaged_error(self.path, error) from error

    return wrapper


class RunStore:
    """Read-only access to one run's history."""

    def __init__(self, run_dir: RunDir) -> None:
        self.path = run_dir.db_path
        self._connection = _open_read_only(self.path)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @_raises_store_error
    def snapshot(self) -> RunSnapshot:
        """Return the last snapshot that the supervisor wrote."""
        row = self._connection.execute("SELECT document FROM snapshot").fetchone()
        if row is None:
            raise no_history_error(self.path, "it holds no state of the run yet.")
        try:
            return snapshot_from_json(json.loads(row[0]))
        except ValueError as error:
            raise store_error(
                self.path, f"the run's stored state is damaged ({error}).", "Delete the run."
            ) from error

    @_raises_store_error
    def metric_names(self) -> list[str]:
        """Return the names of logged metrics, and ``train/loss`` if steps have a loss."""
        names = {row[0] for row in self._connection.execute("SELECT name FROM names")}
        if self._has_step_loss():
            names.add(TRAIN_LOSS)
        return sorted(names)

    @_raises_store_error
    def logged_names(self) -> list[str]:
        """Return the names of metrics that the user logged."""
        return sorted(row[0] for row in self._connection.execute("SELECT name FROM names"))

    def _has_step_loss(self) -> bool:
        for table, column in (("step_windows", "loss_mean"), ("steps", "loss")):
            query = f"SELECT 1 FROM {table} WHERE {column} IS NOT NULL LIMIT 1"  # noqa: S608
            if self._connection.execute(query).fetchone():
                return True
        return False

    @_raises_store_error
    def attempts(self) -> list[dict[str, Any]]:
        """Return every attempt with its columns, first to last."""
        cursor = self._connection.execute("SELECT * FROM attempts ORDER BY attempt")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    # -- curves --------------------------------------------------------------------------------

    @_raises_store_error
    def curve(
        self,
        metric: str,
        *,
        max_points: int = 2000,
        rank: int | None = 0,
        first_step: int | None = None,
        last_step: int | None = None,
        attempt: int | None = None,
    ) -> Curve:
        """Return ``metric`` over steps, without superseded steps, in at most ``max_points`` points.

        If ``rank`` is None, the curve is the mean over ranks with the lowest and highest value of
        any rank. ``first_step`` and ``last_step`` limit the steps; both are included. ``attempt``
        limits the curve to one attempt.
        """
        source = self._source(metric)
        if source is None:
            return _to_curve([])
        first = 0 if first_step is None else first_step
        parts: list[tuple[float, ...]] = []
        for span in spans(self._connection):
            if attempt is not None and span.attempt != attempt:
                continue
            last = span.last_step if last_step is None else min(last_step, span.last_step)
            parts += source.read(self._connection, span, rank, first, last)
        parts.sort(key=lambda row: row[0])
        return _merge_points(_to_curve(parts), max_points)

    def _source(self, metric: str) -> _Source | None:
        row = self._connection.execute("SELECT id FROM names WHERE name = ?", (metric,)).fetchone()
        if row is not None:
            return _Source(SAMPLES, "value", (int(row[0]),))
        if metric in STEP_SERIES:
            return _Source(STEPS, STEP_SERIES[metric], ())
        return _Source(STEPS, ROW_SERIES[metric], ()) if metric in ROW_SERIES else None

    @_raises_store_error
    def attempt_ranks(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks with stored steps for each attempt with steps that count.

        A run may be resumed on another number of ranks, so attempts may have different ranks.
        """
        ranks: dict[int, tuple[int, ...]] = {}
        for span in spans(self._connection):
            rows = self._connection.execute(
                "SELECT rank FROM cursors WHERE attempt = ? ORDER BY rank", (span.attempt,)
            )
            ranks[span.attempt] = tuple(row[0] for row in rows)
        return ranks

    # -- events and readings --------------------------------------------------------------------

    @_raises_store_error
    def events(self, after_id: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return events with a larger id than ``after_id``, in the order in which they arrived."""
        rows = self._connection.execute(
            "SELECT id, attempt, rank, t, kind, text, data FROM events WHERE id > ? "
            "AND kind NOT IN ('hello', 'plan') ORDER BY id LIMIT ?",
            (after_id, limit),
        )
        return [
            StoredEvent(number, attempt, rank, t, kind, text, json.loads(data or "{}"))
            for number, attempt, rank, t, kind, text, data in rows
        ]

    @_raises_store_error
    def hello_and_plan(self, attempt: int) -> dict[int, dict[str, dict[str, Any]]]:
        """Return the last ``hello`` and ``plan`` label of each rank in an attempt."""
        labels: dict[int, dict[str, dict[str, Any]]] = {}
        rows = self._connection.execute(
            "SELECT rank, kind, data FROM events WHERE attempt = ? "
            "AND kind IN ('hello', 'plan') ORDER BY id",
            (attempt,),
        )
        for rank, kind, data in rows:
            labels.setdefault(rank, {})[kind] = json.loads(data)
        return labels

    @_raises_store_error
    def state_changes(self) -> list[StateChange]:
        """Return all changes of the run's state, first to last."""
        rows = self._connection.execute("SELECT attempt, t, state, detail FROM states ORDER BY id")
        return [StateChange(*row) for row in rows]

    @_raises_store_error
    def gaps(self) -> list[Gap]:
        """Return the gaps in the history."""
        rows = self._connection.execute(
            "SELECT attempt, rank, after_seq, missed, t, reason FROM gaps ORDER BY id"
        )
        return [Gap(*row) for row in rows]

    @_raises_store_error
    def verdicts(self) -> list[Verdict]:
        """Return every verdict of the run, oldest first."""
        rows = self._connection.execute("SELECT document FROM verdicts ORDER BY began, id")
        return [from_json(Verdict, json.loads(row[0]), tolerant=True) for row in rows]

    @_raises_store_error
    def gpu_history(self, index: int, last_s: float) -> StoredGpuReadings:
        """Return the readings of a GPU in the ``last_s`` seconds before its newest reading."""
        rows = self._connection.execute(
            "SELECT t, utilisation_percent, memory_used_bytes, power_w, temperature_c "
            "FROM gpu_samples WHERE gpu = ?1 AND t >= "
            "(SELECT max(t) FROM gpu_samples WHERE gpu = ?1) - ?2 ORDER BY t",
            (index, last_s),
        ).fetchall()
        columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        return StoredGpuReadings(*columns)

    # -- export --------------------------------------------------------------------------------

    @_raises_store_error
    def export(self, metrics: Sequence[str]) -> Iterator[ExportRow]:
        """Yield one row per metric, step and rank, without superseded steps.

        Old steps that are stored only as windows give one row per window.
        """
        return self._export(metrics)

    def _export(self, metrics: Sequence[str]) -> Iterator[ExportRow]:
        for metric in metrics:
            source = self._source(metric)
            if source is None:
                continue
            for span in spans(self._connection):
                series = Series(source.family, source.column, source.name_key, span)
                yield from export_rows(self._connection, metric, series)


def _open_read_only(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise no_history_error(path, "the run has no history yet.")
    connection = None
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0, check_same_thread=False
        )
        try:
            version = check_layout(path, connection)
        except sqlite3.OperationalError:
            # On a read-only or full disk SQLite cannot create its shared index file. Read the
            # database as it is.
            connection.close()
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?immutable=1", uri=True, check_same_thread=False
            )
            version = check_layout(path, connection)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise damaged_error(path, error) from error
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    if version == 0:
        connection.close()
        raise no_history_error(path, "the run has no history yet.")
    return connection


@dataclass(frozen=True, slots=True)
class _Source:
    """One series in one of the two pairs of tables."""

    family: TablePair
    column: str
    name_key: tuple[int, ...]

    def read(
        self, db: sqlite3.Connection, span: Span, rank: int | None, lo: int, hi: int
    ) -> list[tuple[float, ...]]:
        """Return (step, epoch, time, mean, low, high, n) rows from step ``lo`` to ``hi``.

        A long range is read at a coarser resolution.
        """
        key, where = self._where(span.attempt, rank)
        if self.column not in self.family.values:
            return self._binned(db, where, key, lo, hi)
        bounds = self._bounds(db, where, key, hi)
        if bounds is None:
            return []
        level = _resolution(max(bounds[0], lo), min(bounds[1], hi))
        rows: list[tuple[float, ...]] = []
        start = lo
        for size in reversed([size for size in WINDOW_SIZES if size <= level]):
            part = self._windows(db, where, key, size, start, hi, rank is None)
            rows += part[0]
            start = max(start, part[1])
        if level <= WINDOW_SIZES[0] and start == lo:
            # The range is short enough for rows, but the oldest may exist only as windows.
            first_row = self._first_row(db, where, key)
            if first_row is None or first_row > lo:
                part = self._windows(
                    db,
                    where,
                    key,
                    WINDOW_SIZES[0],
                    lo,
                    min(hi, (first_row or hi) - 1),
                    rank is None,
                )
                rows += part[0]
                start = max(start, part[1])
        return rows + self._rows(db, where, key, start, hi, rank is None)

    def _binned(
        self, db: sqlite3.Connection, where: str, key: tuple[int, ...], lo: int, hi: int
    ) -> list[tuple[float, ...]]:
        """Return rows of a column that has no windows, merged like windows."""
        c, rows = self.column, self.family.rows
        inside = f"{where} AND step >= ? AND step <= ?"
        first, last = db.execute(
            f"SELECT min(step), max(step) FROM {rows} WHERE {inside}",  # noqa: S608
            (*key, lo, hi),
        ).fetchone()
        if first is None:
            return []
        return db.execute(
            f"SELECT avg(step), avg(epoch), avg({self.family.time}), avg({c}), min({c}), max({c}), "  # noqa: S608
            f"count({c}) FROM {rows} WHERE {inside} GROUP BY step / ? ORDER BY step / ?",
            (*key, lo, hi, level := _resolution(first, last), level),
        ).fetchall()

    def _where(self, attempt: int, rank: int | None) -> tuple[tuple[int, ...], str]:
        key: tuple[int, ...] = (attempt,)
        where = "attempt = ?"
        if rank is not None:
            key, where = (*key, rank), f"{where} AND rank = ?"
        if self.name_key:
            key, where = (*key, *self.name_key), f"{where} AND name_id = ?"
        return key, where

    def _bounds(
        self, db: sqlite3.Connection, where: str, key: tuple[int, ...], hi: int
    ) -> tuple[int, int] | None:
        steps: list[int] = []
        for table, first, last in (
            (self.family.rows, "step", "step"),
            (self.family.windows, "first_step", "last_step"),
        ):
            extra = f" AND level = {WINDOW_SIZES[-1]}" if table == self.family.windows else ""
            row = db.execute(
                f"SELECT (SELECT min({first}) FROM {table} WHERE {where}{extra}), "  # noqa: S608
                f"(SELECT max({last}) FROM {table} WHERE {where}{extra})",
                (*key, *key),
            ).fetchone()
            steps += [v for v in row if v is not None]
        return (min(steps), min(max(steps), hi)) if steps else None

    def _first_row(self, db: sqlite3.Connection, where: str, key: tuple[int, ...]) -> int | None:
        row = db.execute(
            f"SELECT min(step) FROM {self.family.rows} WHERE {where}",  # noqa: S608
            key,
        ).fetchone()
        return None if row[0] is None else int(row[0])

    def _windows(
        self,
        db: sqlite3.Connection,
        where: str,
        key: tuple[int, ...],
        level: int,
        lo: int,
        hi: int,
        merge: bool,
    ) -> tuple[list[tuple[float, ...]], int]:
        """Return the windows within ``lo`` to ``hi``, and the first step after them."""
        c = self.column
        first, stop = -(-lo // level), (hi + 1) // level
        if merge:
            values = (
                f"avg((first_step + last_step) / 2.0), avg(epoch), avg(wall_s), "
                f"sum({c}_mean * {c}_n) / nullif(sum({c}_n), 0), min({c}_low), max({c}_high), "
                f"sum({c}_n), win"
            )
            group = "GROUP BY win"
        else:
            values = (
                f"(first_step + last_step) / 2.0, epoch, wall_s, {c}_mean, {c}_low, {c}_high, "
                f"{c}_n, win"
            )
            group = ""
        rows = db.execute(
            f"SELECT {values} FROM {self.family.windows} WHERE {where} AND level = ? "  # noqa: S608
            f"AND win >= ? AND win < ? {group} ORDER BY win",
            (*key, level, first, stop),
        ).fetchall()
        if not rows:
            return [], lo
        return [row[:7] for row in rows], (int(rows[-1][7]) + 1) * level

    def _rows(
        self,
        db: sqlite3.Connection,
        where: str,
        key: tuple[int, ...],
        lo: int,
        hi: int,
        merge: bool,
    ) -> list[tuple[float, ...]]:
        c, t = self.column, self.family.time
        values = (
            f"step, avg(epoch), avg({t}), avg({c}), min({c}), max({c}), count({c})"
            if merge
            else f"step, epoch, {t}, {c}, {c}, {c}, {c} IS NOT NULL"
        )
        return db.execute(
            f"SELECT {values} FROM {self.family.rows} WHERE {where} AND step >= ? "  # noqa: S608
            f"AND step <= ? {'GROUP BY step' if merge else ''} ORDER BY step",
            (*key, lo, hi),
        ).fetchall()


def _resolution(lo: int, hi: int) -> int:
    """Return the steps per point of the finest resolution with at most ``_MAX_POINTS_READ`` points.

    The result is 1 if rows are read.
    """
    for size in (1, *WINDOW_SIZES):
        if (hi - lo) / size <= _MAX_POINTS_READ:
            return size
    return WINDOW_SIZES[-1]


def _to_curve(rows: list[tuple[float, ...]]) -> Curve:
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    return Curve(*np.ascontiguousarray(table.T))


def _merge_points(curve: Curve, max_points: int) -> Curve:
    """Merge neighbouring points until at most ``max_points`` remain; keep lows and highs."""
    n = len(curve)
    if n <= max_points:
        return curve
    starts = np.linspace(0, n, max_points, endpoint=False).astype(np.intp)
    points = np.diff(np.append(starts, n))
    weights = np.where(np.isfinite(curve.mean), curve.count, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        total_weight = np.add.reduceat(weights, starts)
        mean = (
            np.add.reduceat(np.where(weights > 0, curve.mean, 0.0) * weights, starts) / total_weight
        )
        return Curve(
            steps=np.add.reduceat(curve.steps, starts) / points,
            epochs=np.add.reduceat(curve.epochs, starts) / points,
            times=np.add.reduceat(curve.times, starts) / points,
            mean=mean,
            low=np.fmin.reduceat(curve.low, starts),
            high=np.fmax.reduceat(curve.high, starts),
            count=np.add.reduceat(curve.count, starts),
        )
