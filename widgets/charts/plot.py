"""A whole chart as a canvas of characters: curves, bands, axes, legend and read-out.

Pure: the same values give the same picture. What depends on the picture before (the range of the y
axis, which is kept while it fits) is handed in and given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len

from ltui.widgets.charts import braille
from ltui.widgets.charts.axis_scale import (
    NOISE,
    AxisRange,
    AxisTick,
    linear_ticks,
    log_ticks,
    sticky_range,
)
from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.charts.chart_options import (
    INK_CURSOR,
    INK_DIM,
    INK_FAINT,
    ChartOptions,
    ink_of,
    marker_of,
)
from ltui.widgets.charts.legend import draw_legend, value_at
from ltui.widgets.charts.viewport import visible_range
from ltui.widgets.formats import metric
from ltui.widgets.view_models import ChartSeries, ChartViewModel, FloatArray

MARGIN, MOST_MARGIN = 7, 13
"""Cells for the labels of the y axis: as a rule, and where they need more digits."""
CUT_SHARE, CUT_SHARE_FAINT = 0.05, 0.15
"""Share of a curve's width whose values may be cut at either end of the y axis; more of a faint
one, which lies behind its own smoothed curve."""
FLATTENED = 2.5
"""Outliers are cut where the axis would have to be so many times as long to hold them."""
_LEAST_COLUMNS = 20
"""Curves of fewer points have no outliers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plot:
    canvas: Canvas
    area: PlotArea | None
    x: AxisRange | None
    y: AxisRange | None
    """Range of the y axis, as a power of ten where ``log_y``; hand it to the next ``plot``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotArea:
    """Where on the canvas the curves are, in cells."""

    left: int
    top: int
    width: int
    height: int

    @classmethod
    def within(cls, width: int, height: int, margin: int = MARGIN) -> PlotArea:
        axes, legend = width >= 20 and height >= 4, height >= 6
        left = margin if axes else 0
        right = 1 if axes else 0
        return cls(
            left=left,
            top=1 if legend else 0,
            width=max(1, width - left - right),
            height=max(1, height - (1 if legend else 0) - (1 if axes else 0)),
        )


def data_range(view_model: ChartViewModel | None) -> AxisRange | None:
    """From the first to the last ``x`` of any series, and ``x_ends``; None without a point."""
    if view_model is None:
        return None
    ends = [(float(s.x[0]), float(s.x[-1])) for s in view_model.series if s.x.size]
    if ends and view_model.x_ends is not None:
        ends.append(view_model.x_ends)
    ends = [(a, b) for a, b in ends if np.isfinite(a) and np.isfinite(b)]
    return AxisRange(min(a for a, _ in ends), max(b for _, b in ends)) if ends else None


def plot(
    view_model: ChartViewModel | None,
    options: ChartOptions,
    width: int,
    height: int,
    before: AxisRange | None = None,
) -> Plot:
    """Draw ``view_model`` on ``width`` x ``height`` cells."""
    canvas = Canvas(max(1, width), max(1, height))
    data = data_range(view_model)
    if view_model is None or data is None:
        _note(canvas, view_model.note if view_model and view_model.note else "no data yet")
        return Plot(canvas=canvas, area=None, x=None, y=before)
    x = visible_range(options.view, data)
    layout = _lay_out(canvas, view_model, options, x, before)
    area, y = layout.area, layout.y
    _axes(canvas, view_model, options, layout, x)
    _curves(canvas, area, layout.curves, y, options)
    if options.cursor is not None and x.low <= options.cursor <= x.high:
        _crosshair(canvas, area, x, options.cursor)
    if area.top:
        draw_legend(canvas, view_model, options)
    if layout.extremes is None:
        note = "no values in this range" if options.view else view_model.note or "no values yet"
        _note(canvas, f"{note}, on a log scale" if options.log_y else note)
    elif not options.log_y:
        _say_what_is_cut(canvas, area, layout.extremes, y)
    return Plot(canvas=canvas, area=area, x=x, y=y)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layout:
    """Curves and ticks on an area whose margin holds the ticks' labels."""

    area: PlotArea
    curves: list[_Curve]
    y: AxisRange
    ticks: list[AxisTick]
    extremes: tuple[float, float] | None


def _lay_out(
    canvas: Canvas,
    view_model: ChartViewModel,
    options: ChartOptions,
    x: AxisRange,
    before: AxisRange | None,
) -> _Layout:
    margin = MARGIN
    while True:
        area = PlotArea.within(canvas.width, canvas.height, margin)
        curves = [_Curve(s, x, area, options.log_y) for s in view_model.series]
        extremes = _union([c.extremes for c in curves])
        if extremes is None:
            y = before or AxisRange(0.0, 1.0)
        else:
            cut = view_model.cut_outliers and not options.outliers and not options.log_y
            low, high = _without_outliers(curves, extremes) if cut else extremes
            y = sticky_range(low, high, before, parts=5 if options.log_y else 10)
        most = max(2, min(8, area.height // 4 + 1))
        ticks = log_ticks(y, most) if options.log_y else linear_ticks(y, most)
        needed = max((cell_len(tick.label) for tick in ticks), default=0) + 1
        if needed <= margin or margin == MOST_MARGIN or not area.left:
            return _Layout(area=area, curves=curves, y=y, ticks=ticks, extremes=extremes)
        margin = min(needed, MOST_MARGIN)


def _union(ranges: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [r for r in ranges if r is not None]
    return (min(a for a, _ in known), max(b for _, b in known)) if known else None


def _without_outliers(
    curves: Sequence[_Curve], extremes: tuple[float, float]
) -> tuple[float, float]:
    """The range of nearly all values and of each newest one; ``extremes`` if it is hardly less."""
    usual = _union([c.usual for c in curves])
    if usual is None or usual[1] - usual[0] <= NOISE * max(abs(usual[0]), abs(usual[1])):
        return extremes
    room = 0.25 * (usual[1] - usual[0])
    low, high = max(extremes[0], usual[0] - room), min(extremes[1], usual[1] + room)
    return (low, high) if extremes[1] - extremes[0] > FLATTENED * (high - low) else extremes


def _say_what_is_cut(
    canvas: Canvas, area: PlotArea, extremes: tuple[float, float], y: AxisRange
) -> None:
    """In a corner of the area, so that nobody takes the axis for all there is."""
    above = f"values up to {metric(extremes[1])} cut, o: show all"
    below = f"values down to {metric(extremes[0])} cut, o: show all"
    slack = 1e-9 * y.span
    for text, row, there in (
        (above, area.top, extremes[1] > y.high + slack),
        (below, area.top + area.height - 1, extremes[0] < y.low - slack),
    ):
        if there and cell_len(text) < area.width:
            canvas.write(area.left + area.width - cell_len(text), row, text, INK_DIM)


class _Curve:
    """A series reduced to the columns in view, on the scale of the axis."""

    def __init__(self, series: ChartSeries, x: AxisRange, area: PlotArea, log_y: bool) -> None:
        self.series = series
        self._x, self._dots, self._log = x, 2 * area.width, log_y
        self.line = self._columns(series.y)
        banded = series.low is not None and series.high is not None
        self.low = self._columns(series.low) if banded and series.low is not None else None
        self.high = self._columns(series.high) if banded and series.high is not None else None

    def _columns(self, y: FloatArray) -> braille.CurveColumns:
        found = braille.decimate(
            self.series.x, y, self._x.low, self._x.high, self._dots, positive=self._log
        )
        if not self._log:
            return found
        with np.errstate(invalid="ignore"):
            return braille.CurveColumns(
                at=found.at,
                first=np.log10(found.first),
                last=np.log10(found.last),
                low=np.log10(found.low),
                high=np.log10(found.high),
            )

    @property
    def extremes(self) -> tuple[float, float] | None:
        lows, highs = self._bounds()
        return (float(lows.min()), float(highs.max())) if lows.size else None

    @property
    def usual(self) -> tuple[float, float] | None:
        """The range without a share of the columns at either end, with the newest value."""
        lows, highs = self._bounds()
        if lows.size < _LEAST_COLUMNS:
            return self.extremes
        share = CUT_SHARE_FAINT if self.series.dim else CUT_SHARE
        low, high = float(np.quantile(lows, share)), float(np.quantile(highs, 1 - share))
        newest = _inside(self.line, self.line.last, self._dots)
        if newest.size and not self.series.dim:
            low, high = min(low, float(newest[-1])), max(high, float(newest[-1]))
        return low, high

    def _bounds(self) -> tuple[FloatArray, FloatArray]:
        """Lowest and highest values of the columns in view."""
        parts = [c for c in (self.line, self.low, self.high) if c is not None]
        return (
            np.concatenate([_inside(part, part.low, self._dots) for part in parts]),
            np.concatenate([_inside(part, part.high, self._dots) for part in parts]),
        )


def _inside(curve: braille.CurveColumns, values: FloatArray, dots: int) -> FloatArray:
    """The finite ones of ``values`` in view."""
    chosen = values[(curve.at >= 0) & (curve.at < dots)]
    return chosen[np.isfinite(chosen)]


def _note(canvas: Canvas, text: str) -> None:
    x = max(0, (canvas.width - cell_len(text)) // 2)
    canvas.write(x, (canvas.height - 1) // 2, text, INK_DIM)


def _axes(
    canvas: Canvas, view_model: ChartViewModel, options: ChartOptions, layout: _Layout, x: AxisRange
) -> None:
    area, y = layout.area, layout.y
    if not area.left:
        return
    for tick in layout.ticks:
        row = (
            area.top + int(braille.rows_of(np.array(tick.at), y.low, y.high, 4 * area.height)) // 4
        )
        canvas.write(0, row, tick.label.rjust(area.left - 1)[: area.left - 1], INK_DIM)
        if options.grid:
            canvas.write(area.left, row, "┈" * area.width, INK_FAINT)
    _x_axis(canvas, area, view_model, x)


def _x_axis(canvas: Canvas, area: PlotArea, view_model: ChartViewModel, x: AxisRange) -> None:
    row = area.top + area.height
    name = view_model.x_label
    # The name stands at the right end, where the numbers leave room for it.
    free = area.left + area.width - cell_len(name) - 1 if name else canvas.width
    if area.width < 30:
        free, name = canvas.width, ""
    canvas.write(free + 1, row, name, INK_DIM)
    end = area.left - 2
    most = max(2, area.width // 14)
    for tick in linear_ticks(x, most, time=view_model.x_time, whole=view_model.x_whole):
        place = area.left + column(tick.at, x, area.width)
        start = max(area.left, place - cell_len(tick.label) // 2)
        if start <= end + 1 or start + cell_len(tick.label) > free:
            continue
        end = canvas.write(start, row, tick.label, INK_DIM)


def column(at: float, x: AxisRange, width: int) -> int:
    """The cell in which ``at`` lies."""
    if x.span <= 0:
        return 0
    return min(width - 1, max(0, int((at - x.low) / x.span * width)))


def _curves(
    canvas: Canvas, area: PlotArea, curves: list[_Curve], y: AxisRange, options: ChartOptions
) -> None:
    size = (y.low, y.high, area.width, area.height)
    # Faint ones first, so that what matters lies on top.
    order = sorted(curves, key=lambda c: not c.series.dim)
    for curve in order:
        if curve.low is not None and curve.high is not None:
            dots = braille.band(curve.low, curve.high, *size)
            canvas.blit(
                area.left, area.top, dots, braille.BLANK, ink_of(curve.series, options, True)
            )
    for curve in order:
        dash = curve.series.colour % 4 if options.dashes else 0
        dots = braille.line(curve.line, *size, dash=dash)
        ink = ink_of(curve.series, options, curve.series.dim)
        canvas.blit(area.left, area.top, dots, braille.BLANK, ink)
    for curve in order:
        if not curve.series.dim:
            _end_marker(canvas, area, curve, y, options)


def _end_marker(
    canvas: Canvas, area: PlotArea, curve: _Curve, y: AxisRange, options: ChartOptions
) -> None:
    """A sign at the last value in view, but not where the curve runs on beyond the right edge."""
    line = curve.line
    inside = np.flatnonzero(np.isfinite(line.last) & (line.at >= 0))
    if not inside.size or line.at[inside[-1]] >= 2 * area.width:
        return
    last = inside[-1]
    row = int(braille.rows_of(line.last[last : last + 1], y.low, y.high, 4 * area.height)[0]) // 4
    if 0 <= row < area.height:
        x = area.left + int(line.at[last]) // 2
        canvas.write(
            x, area.top + row, marker_of(curve.series), ink_of(curve.series, options, False)
        )


def _crosshair(canvas: Canvas, area: PlotArea, x: AxisRange, cursor: float) -> None:
    place = area.left + column(cursor, x, area.width)
    for row in range(area.top, area.top + area.height):
        if chr(canvas.chars[row, place]) in " ┈":
            canvas.write(place, row, "│", INK_CURSOR)


def nearest_x(series: Sequence[ChartSeries], x: float) -> float | None:
    """The ``x`` of the point of any series that is nearest, so that a crosshair stands on data."""
    points = [p[0] for s in series if (p := value_at(s, x)) is not None]
    return min(points, key=lambda p: abs(p - x), default=None)


def next_x(series: Sequence[ChartSeries], x: float, direction: int) -> float | None:
    """The ``x`` of the first point of any series beyond ``x``; None where there is none."""
    found = []
    for one in series:
        if direction > 0:
            index = int(np.searchsorted(one.x, x, side="right"))
        else:
            index = int(np.searchsorted(one.x, x, side="left")) - 1
        if 0 <= index < one.x.size:
            found.append(float(one.x[index]))
    if not found:
        return None
    return min(found) if direction > 0 else max(found)
