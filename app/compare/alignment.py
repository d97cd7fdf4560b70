"""Align curves of several runs: positions on a common x axis, and values at common positions.

Pure, NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct

from ltui.app.live.curve_arithmetic import epoch_positions
from ltui.training.store.curve_reader import Curve, FloatArray

BANDS = ("minmax", "std", "stderr", "ci95")
"""Kinds of bands: minimum to maximum, standard deviation, standard error, 95 % interval of the
mean."""
BAND_NAMES = {
    "minmax": "min to max",
    "std": "± standard deviation",
    "stderr": "± standard error",
    "ci95": "95 % interval",
}


class Band(Struct, frozen=True, eq=False):
    """Mean and band over the runs of a group, for each position."""

    mean: FloatArray
    low: FloatArray
    """NaN where fewer than two runs have a value, unless the band is the range of values."""
    high: FloatArray
    count: FloatArray
    """Number of runs that have a value."""


def band_of(table: FloatArray, kind: str) -> Band:
    """Return mean and band over the rows of ``table`` (runs by positions); NaN is a missing value.

    ``kind`` is one of ``BANDS``. The standard deviation is that of a sample (n - 1); the interval
    is that of the mean by Student's t distribution.
    """
    finite = np.isfinite(table)
    count = finite.sum(axis=0).astype(np.float64)
    known = np.where(count > 0, count, np.nan)
    # Divided first, because the sum of huge numbers is infinite.
    mean = (np.where(finite, table, 0.0) / known).sum(axis=0)
    if kind == "minmax":
        low = np.where(count > 0, np.where(finite, table, np.inf).min(axis=0, initial=np.inf), mean)
        high = np.where(
            count > 0, np.where(finite, table, -np.inf).max(axis=0, initial=-np.inf), mean
        )
        return Band(mean, low, high, count)
    with np.errstate(over="ignore"):
        squares = np.where(finite, table - mean, 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=0) / np.where(count > 1, count - 1, np.nan))
    half = deviation * _factors(count, kind)
    return Band(mean, mean - half, mean + half, count)


def _factors(count: FloatArray, kind: str) -> FloatArray:
    """Return by how much the standard deviation is multiplied for each number of runs."""
    if kind == "std":
        return np.ones(len(count))
    root = np.sqrt(np.where(count > 1, count, np.nan))
    if kind == "stderr":
        return np.asarray(1.0 / root)
    quantiles = [t_quantile(int(n) - 1) if n > 1 else math.nan for n in count]
    return np.array(quantiles, dtype=np.float64) / root


@lru_cache(maxsize=1024)
def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Return t so that ``confidence`` of Student's distribution is between -t and t."""
    low, high = 0.0, 1.0
    while _t_probability(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if _t_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_probability(t: float, freedom: int) -> float:
    """Return the probability between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    if freedom == 1:
        total = 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


AXES = ("step", "epoch", "time")
"""Quantities by which curves are aligned."""
MAX_POSITIONS = 1000
"""Maximum number of common positions of a group: more than a terminal has columns."""


class Line(Struct, frozen=True, eq=False):
    """Values over an axis. ``x`` is ascending and finite; NaN in ``y`` is a gap."""

    x: FloatArray
    y: FloatArray


class Clock(Struct, frozen=True, kw_only=True):
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
