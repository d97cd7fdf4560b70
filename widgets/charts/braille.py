"""Draw curves as braille dots, two by four in each cell, with NumPy.

Pure. A curve is first reduced to one span (minimum to maximum) for each column of dots. No peak is
lost, and the cost of drawing does not depend on the length of the history.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ltui.widgets.view_models import FloatArray

IntArray = npt.NDArray[np.uint32]
BoolArray = npt.NDArray[np.bool_]

BLANK = 0x2800
LARGEST = 1e280
"""Larger values are drawn as this one, so that sums and ranges of values do not overflow."""
THIN_DOTS = 3
"""Maximum dots of a column of a thin line that are all drawn."""
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint32)


class CurveColumns(Struct, frozen=True, kw_only=True, eq=False):
    """A curve reduced to columns of equal width; NaN if a column has no point, or only gaps."""

    at: FloatArray
    """Column number of each entry, ascending, with the nearest points outside the view."""
    first: FloatArray
    """First value of the curve in the column; NaN if the curve begins after a gap."""
    last: FloatArray
    low: FloatArray
    high: FloatArray

    @property
    def values(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        return self.first, self.last, self.low, self.high


def decimate(
    x: FloatArray,
    y: FloatArray,
    x_low: float,
    x_high: float,
    columns: int,
    *,
    positive: bool = False,
) -> CurveColumns:
    """Reduce the points with ``x_low <= x <= x_high`` to ``columns`` columns, keeping extremes.

    ``x`` is ascending. NaN and infinite values are gaps; with ``positive``, so are values <= 0.
    """
    edges = np.linspace(x_low, x_high, columns + 1)
    cuts = np.searchsorted(x, edges, side="left")
    cuts[-1] = np.searchsorted(x, x_high, side="right")
    filled = np.flatnonzero(cuts[1:] > cuts[:-1])
    starts, ends = cuts[:-1][filled], cuts[1:][filled]
    at = filled.astype(np.float64)
    scale = columns / (x_high - x_low) if x_high > x_low else 0.0
    # One more point on either side, so that the line continues to the edges of the chart.
    if cuts[0] > 0:
        starts, ends = np.append(cuts[0] - 1, starts), np.append(cuts[0], ends)
        at = np.append(min(-1.0, np.floor((x[cuts[0] - 1] - x_low) * scale)), at)
    if cuts[-1] < x.size and np.isfinite(x[cuts[-1]]):
        starts, ends = np.append(starts, cuts[-1]), np.append(ends, cuts[-1] + 1)
        at = np.append(at, max(float(columns), np.floor((x[cuts[-1]] - x_low) * scale)))
    if not starts.size:
        none = np.empty(0)
        return CurveColumns(at=none, first=none, last=none, low=none, high=none)
    low, high, values = _extremes(y[starts[0] : ends[-1]], starts - starts[0], positive)
    begin = starts[0]
    parts = (values[starts - begin], values[ends - begin - 1], low, high)
    first, last, low, high = (np.clip(part, -LARGEST, LARGEST) for part in parts)
    return CurveColumns(at=at, first=first, last=last, low=low, high=high)


def _extremes(
    values: FloatArray, starts: npt.NDArray[np.intp], positive: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    clean = np.isfinite(low).all() and np.isfinite(high).all()
    if clean and not (positive and low.min() <= 0):
        return low, high, values
    keep = np.isfinite(values)
    if positive:
        keep &= values > 0
    values = np.where(keep, values, np.nan)
    return np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts), values


def spans(curve: CurveColumns, columns: int) -> tuple[FloatArray, FloatArray]:
    """Return bottom and top of the line in every column.

    A column spans its extremes and the midpoints to its neighbours. A column without a point is on
    the straight line between its neighbours; a gap is NaN.
    """
    nothing = np.full(columns, np.nan)
    if not curve.at.size:
        return nothing, nothing
    position = np.arange(-1.0, columns + 1.0)
    last = curve.at.size - 1
    right = np.searchsorted(curve.at, position, side="left")
    nearest = np.minimum(right, last)
    enter, leave, low, high = (part[nearest] for part in curve.values)
    missing = np.flatnonzero(curve.at[nearest] != position)
    if missing.size:
        after = right[missing]
        before = np.maximum(after - 1, 0)
        after = np.minimum(after, last)
        width = np.maximum(curve.at[after] - curve.at[before], 1.0)
        share = (position[missing] - curve.at[before]) / width
        between = curve.last[before] * (1 - share) + curve.first[after] * share
        between[before == after] = np.nan
        for part in (enter, leave, low, high):
            part[missing] = between
    # The midpoint between the end of a column and the start of the next; NaN at a gap.
    middle = (leave[:-1] + enter[1:]) / 2
    bottom = np.fmin(np.fmin(low[1:-1], middle[:-1]), middle[1:])
    top = np.fmax(np.fmax(high[1:-1], middle[:-1]), middle[1:])
    return bottom, top


def rows_of(values: FloatArray, low: float, high: float, dots: int) -> FloatArray:
    """Return the dot rows (0 is the top) of values; values outside the range get rows outside."""
    share = (high - values) / (high - low)
    rows: FloatArray = np.rint(np.minimum(np.maximum(share, -1.0), 2.0) * (dots - 1))
    return rows


def line(
    curve: CurveColumns,
    low: float,
    high: float,
    width: int,
    height: int,
    *,
    dash: int = 0,
    thin: bool = False,
) -> IntArray:
    """Return a curve as braille code points (``height`` x ``width`` cells); ``BLANK`` means no dot.

    With ``dash`` every (``dash`` + 1)-th pair of columns is blank, so that lines differ without
    colour. With ``thin`` the inside of a column that spans many dots has few of them, so that
    noise is no solid wall.
    """
    bottom, top = spans(curve, 2 * width)
    mask = _mask(bottom, top, low, high, height)
    if thin:
        mask &= _sparse(mask)
    if dash:
        mask &= (np.arange(2 * width) // 2 % (dash + 1) != dash)[np.newaxis, :]
    return pack(mask)


def band(
    lows: CurveColumns, highs: CurveColumns, low: float, high: float, width: int, height: int
) -> IntArray:
    """Return the area between two curves as braille code points, with every fourth dot set."""
    bottom, _ = spans(lows, 2 * width)
    _, top = spans(highs, 2 * width)
    mask = _mask(bottom, top, low, high, height)
    mask[1::2, :] = False
    mask[0::4, 1::2] = False
    mask[2::4, 0::2] = False
    return pack(mask)


def _mask(bottom: FloatArray, top: FloatArray, low: float, high: float, height: int) -> BoolArray:
    dots = 4 * height
    first, last = rows_of(top, low, high, dots), rows_of(bottom, low, high, dots)
    row = np.arange(dots, dtype=np.float64)[:, np.newaxis]
    mask: BoolArray = (row >= first) & (row <= last)
    return mask


def _sparse(mask: BoolArray) -> BoolArray:
    """Return every fourth dot, and all dots of the columns that have few."""
    rows, columns = np.arange(mask.shape[0])[:, np.newaxis], np.arange(mask.shape[1])
    kept: BoolArray = ((rows + 2 * columns) % 4 == 0) | (mask.sum(axis=0) <= THIN_DOTS)
    return kept


def pack(mask: BoolArray) -> IntArray:
    """Convert a mask of dots (4 x height, 2 x width) to braille code points (height, width)."""
    height, width = mask.shape[0] // 4, mask.shape[1] // 2
    cells = mask.reshape(height, 4, width, 2)
    codes: IntArray = np.einsum("hdwe,de->hw", cells, _DOTS).astype(np.uint32) + np.uint32(BLANK)
    return codes
