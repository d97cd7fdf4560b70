"""Reader of one series of a run's history: rows or windows, at the resolution that a curve needs.

Pure SQL; ``history_reader.py`` opens the database and reports its errors.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ltui.training.store.attempt_lineage import Span
from ltui.training.store.history_windows import WINDOW_SIZES, TablePair

FloatArray = npt.NDArray[np.float64]

_MAX_POINTS_READ = 20_000
"""Maximum number of points of a curve; it decides at which resolution the curve is read."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One series over a run. All arrays have the same length; steps ascend; NaN is a gap."""

    steps: FloatArray
    """Global step of each point."""
    epochs: FloatArray
    times: FloatArray
    """Unix seconds."""
    mean: FloatArray
    low: FloatArray
    """Smallest value that a point merges."""
    high: FloatArray
    """Largest value that a point merges."""
    count: FloatArray
    """Number of logged values that a point merges."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class SeriesReader:
    """Reads one series from its table of rows and its table of windows."""

    family: TablePair
    column: str
    name_key: tuple[int, ...]
    """Id of a logged metric in the table ``names``; empty for a column of ``steps``."""

    def read(
        self, db: sqlite3.Connection, span: Span, rank: int | None, first_step: int, last_step: int
    ) -> list[tuple[float, ...]]:
        """Return (step, epoch, time, mean, low, high, n) rows for the steps in the range.

        A long range is read at a coarser resolution.
        """
        key, where = self._where(span.attempt, rank)
        if self.column not in self.family.values:
            return self._binned(db, where, key, first_step, last_step)
        bounds = self._bounds(db, where, key, last_step)
        if bounds is None:
            return []
        level = _resolution(max(bounds[0], first_step), min(bounds[1], last_step))
        rows: list[tuple[float, ...]] = []
        start = first_step
        for size in reversed([size for size in WINDOW_SIZES if size <= level]):
            part = self._windows(db, where, key, size, start, last_step, rank is None)
            rows += part[0]
            start = max(start, part[1])
        if level <= WINDOW_SIZES[0] and start == first_step:
            # The range is short enough for rows, but the oldest may exist only as windows.
            first_row = self._first_row(db, where, key)
            if first_row is None or first_row > first_step:
                part = self._windows(
                    db,
                    where,
                    key,
                    WINDOW_SIZES[0],
                    first_step,
                    min(last_step, (first_row or last_step) - 1),
                    rank is None,
                )
                rows += part[0]
                start = max(start, part[1])
        return rows + self._rows(db, where, key, start, last_step, rank is None)

    def _binned(
        self,
        db: sqlite3.Connection,
        where: str,
        key: tuple[int, ...],
        first_step: int,
        last_step: int,
    ) -> list[tuple[float, ...]]:
        """Return rows of a column that has no windows, merged like windows."""
        c, rows = self.column, self.family.rows
        inside = f"{where} AND step >= ? AND step <= ?"
        first, last = db.execute(
            f"SELECT min(step), max(step) FROM {rows} WHERE {inside}",  # noqa: S608
            (*key, first_step, last_step),
        ).fetchone()
        if first is None:
            return []
        return db.execute(
            f"SELECT avg(step), avg(epoch), avg({self.family.time}), avg({c}), min({c}), max({c}), "  # noqa: S608
            f"count({c}) FROM {rows} WHERE {inside} GROUP BY step / ? ORDER BY step / ?",
            (*key, first_step, last_step, level := _resolution(first, last), level),
        ).fetchall()

    def _where(self, attempt: int, rank: int | None) -> tuple[tuple[int, ...], str]:
        """Return the parameters and the SQL condition that select the series."""
        key: tuple[int, ...] = (attempt,)
        where = "attempt = ?"
        if rank is not None:
            key, where = (*key, rank), f"{where} AND rank = ?"
        if self.name_key:
            key, where = (*key, *self.name_key), f"{where} AND name_id = ?"
        return key, where

    def _bounds(
        self, db: sqlite3.Connection, where: str, key: tuple[int, ...], last_step: int
    ) -> tuple[int, int] | None:
        """Return the first and last stored step; None if there are none."""
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
        return (min(steps), min(max(steps), last_step)) if steps else None

    def _first_row(self, db: sqlite3.Connection, where: str, key: tuple[int, ...]) -> int | None:
        """Return the first step that is stored as a row."""
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
        first_step: int,
        last_step: int,
        merge: bool,
    ) -> tuple[list[tuple[float, ...]], int]:
        """Return the windows in the range of steps, and the first step after them."""
        c = self.column
        first, stop = -(-first_step // level), (last_step + 1) // level
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
            return [], first_step
        return [row[:7] for row in rows], (int(rows[-1][7]) + 1) * level

    def _rows(
        self,
        db: sqlite3.Connection,
        where: str,
        key: tuple[int, ...],
        first_step: int,
        last_step: int,
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
            (*key, first_step, last_step),
        ).fetchall()


def _resolution(first_step: int, last_step: int) -> int:
    """Return the steps per point of the finest resolution with at most ``_MAX_POINTS_READ`` points.

    The result is 1 if rows are read.
    """
    for size in (1, *WINDOW_SIZES):
        if (last_step - first_step) / size <= _MAX_POINTS_READ:
            return size
    return WINDOW_SIZES[-1]


def to_curve(rows: list[tuple[float, ...]]) -> Curve:
    """Return (step, epoch, time, mean, low, high, n) rows as a curve."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    return Curve(*np.ascontiguousarray(table.T))


def merge_points(curve: Curve, max_points: int) -> Curve:
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
