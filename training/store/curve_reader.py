"""Reader of one series of a run's history: rows or windows, at the resolution that a curve needs.

Pure SQL; ``history_reader.py`` opens the database and reports its errors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ltui.training.store.history_windows import WINDOW_SIZES, SeriesPart

FloatArray = npt.NDArray[np.float64]

MAX_POINTS_READ = 20_000
"""Default of the maximum number of points that are read; it decides at which resolution."""


class Curve(Struct, frozen=True):
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


Point = tuple[float, ...]
"""step, epoch, time, mean, low, high, n"""


def read_points(
    part: SeriesPart, first_step: int, last_step: int, max_rows: int = MAX_POINTS_READ
) -> list[Point]:
    """Return the points of the steps in the range; a long range has a coarser resolution."""
    if part.column not in part.tables.values:
        return _merged_rows(part, first_step, last_step, max_rows)
    coarsest = f"AND level = {WINDOW_SIZES[-1]}"
    # SQLite answers a single minimum or maximum from the index.
    first_row = part.rows("min(step)").fetchone()[0]
    stored_steps = [
        first_row,
        part.rows("max(step)").fetchone()[0],
        part.windows("min(first_step)", coarsest).fetchone()[0],
        part.windows("max(last_step)", coarsest).fetchone()[0],
    ]
    stored_steps = [step for step in stored_steps if step is not None]
    if not stored_steps:
        return []
    level = _resolution(
        max(min(stored_steps), first_step), min(max(stored_steps), last_step), max_rows
    )
    points: list[Point] = []
    start = first_step
    for size in reversed([size for size in WINDOW_SIZES if size <= level]):
        windows, start = _windows(part, size, start, last_step)
        points += windows
    before_rows = first_row is None or first_row > first_step
    if level <= WINDOW_SIZES[0] and start == first_step and before_rows:
        # The range is short enough for rows, but the oldest may exist only as windows.
        last_window_step = min(last_step, (first_row or last_step) - 1)
        windows, start = _windows(part, WINDOW_SIZES[0], start, last_window_step)
        points += windows
    return points + _rows(part, start, last_step)


def _merged_rows(part: SeriesPart, first_step: int, last_step: int, max_rows: int) -> list[Point]:
    """Return rows of a column that has no windows, merged like windows."""
    c, inside = part.column, "AND step >= ? AND step <= ?"
    first, last = part.rows("min(step), max(step)", inside, first_step, last_step).fetchone()
    if first is None:
        return []
    level = _resolution(first, last, max_rows)
    return part.rows(
        f"avg(step), avg(epoch), avg({part.tables.time}), {part.tables.merged(c)}",
        f"{inside} GROUP BY step / {level} ORDER BY step / {level}",
        first_step,
        last_step,
    ).fetchall()


def _windows(
    part: SeriesPart, size: int, first_step: int, last_step: int
) -> tuple[list[Point], int]:
    """Return the windows in the range of steps, and the first step after them."""
    c = part.column
    columns = f"(first_step + last_step) / 2.0, epoch, wall_s, {c}_mean, {c}_low, {c}_high, {c}_n"
    group = ""
    if part.rank is None:
        columns = (
            "avg((first_step + last_step) / 2.0), avg(epoch), avg(wall_s), "
            f"sum({c}_mean * {c}_n) / nullif(sum({c}_n), 0), min({c}_low), max({c}_high), "
            f"sum({c}_n)"
        )
        group = "GROUP BY win"
    rows = part.windows(
        f"{columns}, win",
        f"AND level = ? AND win >= ? AND win < ? {group} ORDER BY win",
        size,
        -(-first_step // size),
        (last_step + 1) // size,
    ).fetchall()
    if not rows:
        return [], first_step
    return [row[:7] for row in rows], max(first_step, (int(rows[-1][7]) + 1) * size)


def _rows(part: SeriesPart, first_step: int, last_step: int) -> list[Point]:
    c, t = part.column, part.tables.time
    columns, group = f"step, epoch, {t}, {part.tables.single(c)}", ""
    if part.rank is None:
        columns = f"step, avg(epoch), avg({t}), {part.tables.merged(c)}"
        group = "GROUP BY step"
    inside = f"AND step >= ? AND step <= ? {group} ORDER BY step"
    return part.rows(columns, inside, first_step, last_step).fetchall()


def _resolution(first_step: int, last_step: int, max_rows: int) -> int:
    """Return the steps per point of the finest resolution with at most ``max_rows`` points.

    The result is 1 if rows are read.
    """
    for size in (1, *WINDOW_SIZES):
        if (last_step - first_step) / size <= max_rows:
            return size
    return WINDOW_SIZES[-1]


def to_curve(points: list[Point]) -> Curve:
    """Return points as a curve."""
    table = np.array(points, dtype=np.float64).reshape(-1, 7)
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
