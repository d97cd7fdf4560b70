"""Curves as braille dots, two by four a cell, computed with NumPy.

Pure. A curve is first reduced to one span (lowest to highest value) for each column of dots, so
that no peak is lost and drawing costs the same however long the history is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ltui.widgets.view_models import FloatArray

IntArray = npt.NDArray[np.uint32]
BoolArray = npt.NDArray[np.bool_]

BLANK = 0x2800
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CurveColumns:
    """A curve in columns of equal width; NaN where a column has no point, or only gaps."""

    at: FloatArray
    """Column number of each entry, ascending; the neighbours just outside the view are included."""
    first: FloatArray
    """Value with which the curve enters the column; NaN where it begins after a gap."""
    last: FloatArray
    low: FloatArray
    high: FloatArray


def decimate(
    x: FloatArray,
    y: FloatArray,
    x_low: float,
    x_high: float,
    columns: int,
    *,
    positive: bool = False,
) -> CurveColumns:
    """Reduce the points with ``x_low <= x <= x_high`` to ``columns`` columns, extremes kept.

    ``x`` ascends. NaN and infinite values are gaps; with ``positive`` also all up to zero.
    """
    edges = np.linspace(x_low, x_high, columns + 1)
    cuts = np.searchsorted(x, edges, side="left")
    cuts[-1] = np.searchsorted(x, x_high, side="right")
    filled = np.flatnonzero(cuts[1:] > cuts[:-1])
    starts, ends = cuts[:-1][filled], cuts[1:][filled]
    at = filled.astype(np.float64)
    scale = columns / (x_high - x_low) if x_high > x_low else 0.0
    # One point on either side, so that the line runs out of the picture instead of ending in it.
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
    return CurveColumns(
        at=at, first=values[starts - begin], last=values[ends - begin - 1], low=low, high=high
    )


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
    """Bottom and top of the line in every column: its extremes, joined to the neighbours' half-way.

    CurveColumns without a point lie on the straight line between their neighbours; a gap stays NaN.
    """
    nothing = np.full(columns, np.nan)
    if not curve.at.size:
        return nothing, nothing
    place = np.arange(-1.0, columns + 1.0)
    enter, leave, low, high = (_spread(curve, place, part) for part in _PARTS)
    # Half-way between where one column ends and the next begins; NaN where there is a gap.
    middle = (leave[:-1] + enter[1:]) / 2
    bottom = np.fmin(np.fmin(low[1:-1], middle[:-1]), middle[1:])
    top = np.fmax(np.fmax(high[1:-1], middle[:-1]), middle[1:])
    return bottom, top


_PARTS = ("first", "last", "low", "high")


def _spread(curve: CurveColumns, place: FloatArray, part: str) -> FloatArray:
    """The named part of ``curve`` at every place, interpolated between entries."""
    values: FloatArray = getattr(curve, part)
    right = np.searchsorted(curve.at, place, side="left")
    exact = (right < curve.at.size) & (curve.at[np.minimum(right, curve.at.size - 1)] == place)
    inside = (right > 0) & (right < curve.at.size)
    after = np.clip(right, 1, max(1, curve.at.size - 1)) if curve.at.size > 1 else right * 0
    before = np.maximum(after - 1, 0)
    width = np.where(after == before, 1.0, curve.at[after] - curve.at[before])
    share = (place - curve.at[before]) / width
    between = curve.last[before] * (1 - share) + curve.first[after] * share
    result = np.where(inside, between, np.nan)
    return np.where(exact, values[np.minimum(right, values.size - 1)], result)


def rows_of(values: FloatArray, low: float, high: float, dots: int) -> FloatArray:
    """Dot rows (0 on top) of values in ``low`` to ``high``; outside the range, outside the rows."""
    share = (high - values) / (high - low)
    return np.rint(np.clip(share, -1.0, 2.0) * (dots - 1))


def line(
    curve: CurveColumns, low: float, high: float, width: int, height: int, *, dash: int = 0
) -> IntArray:
    """Braille code points, ``height`` x ``width`` cells, of a curve; ``BLANK`` where there is none.

    ``dash`` leaves out every so-manyth pair of columns, to tell lines apart without colour.
    """
    bottom, top = spans(curve, 2 * width)
    mask = _mask(bottom, top, low, high, height)
    if dash:
        mask &= (np.arange(2 * width) // 2 % (dash + 1) != dash)[np.newaxis, :]
    return pack(mask)


def band(
    lows: CurveColumns, highs: CurveColumns, low: float, high: float, width: int, height: int
) -> IntArray:
    """Braille code points of the area between two curves, every fourth dot set."""
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


def pack(mask: BoolArray) -> IntArray:
    """A mask of dots (4 x height, 2 x width) as braille code points (height, width)."""
    height, width = mask.shape[0] // 4, mask.shape[1] // 2
    cells = mask.reshape(height, 4, width, 2)
    codes: IntArray = np.einsum("hdwe,de->hw", cells, _DOTS).astype(np.uint32) + np.uint32(BLANK)
    return codes
