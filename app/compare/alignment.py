"""Align curves of several runs: positions on a common x axis, and values at common positions.

Pure, NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ltui.app.live.curve_arithmetic import epoch_positions
from ltui.training.store.curve_reader import Curve, FloatArray

AXES = ("step", "epoch", "time")
"""Quantities by which curves are aligned."""
MAX_POSITIONS = 1000
"""Maximum number of common positions of a group: more than a terminal has columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Values over an axis. ``x`` is ascending and finite; NaN in ``y`` is a gap."""

    x: FloatArray
    y: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """How the unix times of a run become the time that it has trained."""

    attempts: tuple[tuple[float, float | None], ...] = ()
    """Start and end of each attempt in unix seconds; the end is None while it is unknown."""

    def elapsed(self, times: FloatArray) -> FloatArray:
        """Return seconds since the first attempt started, without the time between attempts."""
        if not self.attempts:
            finite = times[np.isfinite(times)]
            return times - finite[0] if finite.size else times
        begins = np.array([begin for begin, _ in self.attempts])
        ends = [begin if end is None else end for begin, end in self.attempts]
        gaps = np.maximum(0.0, begins[1:] - np.array(ends[:-1]))
        waited = np.concatenate([[0.0], np.cumsum(gaps)])
        attempt = np.clip(np.searchsorted(begins, times, side="right") - 1, 0, None)
        return np.asarray(times - begins[0] - waited[attempt], dtype=np.float64)


def positions_of(
    curve: Curve,
    axis: str,
    *,
    clock: Clock,
    reference: Curve | None = None,
    steps_per_epoch: float | None = None,
) -> FloatArray:
    """Return the position of each point of ``curve`` on ``axis``, one of ``AXES``.

    ``reference`` is the longest curve of the run, which gives the first step of each epoch.
    """
    if axis == "epoch":
        return epoch_positions(
            curve.steps, curve if reference is None else reference, steps_per_epoch
        )
    return clock.elapsed(curve.times) if axis == "time" else curve.steps


def line_of(x: FloatArray, values: FloatArray) -> Line:
    """Return ``values`` at the positions ``x``.

    Points without a position are left out, and infinite values become gaps.
    """
    placed = np.isfinite(x)
    x, y = x[placed], values[placed]
    order = np.argsort(x, kind="stable")
    return Line(x[order], np.where(np.isfinite(y), y, np.nan)[order])


def common_positions(lines: Sequence[Line], most: int = MAX_POSITIONS) -> FloatArray:
    """Return the positions of all points of all lines, ascending, at most ``most`` of them."""
    positions = np.unique(np.concatenate([line.x for line in lines] or [np.empty(0)]))
    if len(positions) <= most:
        return positions
    chosen = np.linspace(0, len(positions) - 1, most).round().astype(np.intp)
    return np.asarray(positions[chosen])


def values_at(line: Line, positions: FloatArray) -> FloatArray:
    """Return the values of a line at ``positions``, linear between its points.

    A value is NaN before the first and after the last point, and next to a gap. So a metric that
    appears late, or a run that ends early, has no value where it has no data.
    """
    x, y = line.x, line.y
    if not len(x):
        return np.full(len(positions), np.nan)
    right = np.minimum(np.searchsorted(x, positions, side="left"), len(x) - 1)
    left = np.where(x[right] == positions, right, np.maximum(right - 1, 0))
    width = x[right] - x[left]
    share = np.where(width > 0, (positions - x[left]) / np.where(width > 0, width, 1.0), 0.0)
    # This form neither overflows for huge values nor turns a step into NaN.
    values = y[left] * (1.0 - share) + y[right] * share
    inside = (positions >= x[0]) & (positions <= x[-1])
    return np.asarray(np.where(inside, values, np.nan), dtype=np.float64)


def align(lines: Sequence[Line], positions: FloatArray) -> FloatArray:
    """Return a table with one row per line and one column per position."""
    rows = [values_at(line, positions) for line in lines]
    return np.array(rows, dtype=np.float64).reshape(len(lines), len(positions))
