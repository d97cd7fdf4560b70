"""Draw a complete chart on a canvas of characters: curves, bands, axes, legend and crosshair.

Pure: the same values give the same canvas. The range of the y axis depends on the previous one,
which is therefore an argument and part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from textwrap import wrap

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len

from ltui.widgets.charts import braille
from ltui.widgets.charts.annotations import (
    MARGIN,
    PlotArea,
    draw_crosshair,
    draw_legend,
    draw_marks,
    draw_selection,
    draw_x_axis,
    value_at,
    value_text,
)
from ltui.widgets.charts.axis_scale import (
    NOISE,
    AxisRange,
    AxisTick,
    linear_ticks,
    log_ticks,
    sticky_log_range,
    sticky_range,
    visible_range,
)
from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.charts.chart_options import (
    INK_DIM,
    INK_FAINT,
    ChartOptions,
    dash_of,
    ink_of,
    marker_of,
)
from ltui.widgets.formats import LOADING, metric
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel, FloatArray

MOST_MARGIN = 13
"""Maximum cells for the labels of the y axis, if they have many digits."""
CUT_SHARE, CUT_SHARE_FAINT = 0.05, 0.15
"""Maximum fraction of a curve's columns that may be cut at each end of the y axis.

More of a faint curve may be cut, because its smoothed curve is drawn over it.
"""
FLATTENED = 2.5
"""Outliers are cut if the axis would have to be longer by this factor to show them."""
STILL_FLATTENED = 1.3
"""The same while they are cut already."""
GRID = "┈  "
"""Pattern of a grid line: with gaps, because it must be fainter than every curve."""
_LABEL_LINES = 6
"""Minimum lines of the area for the values at the ends of the curves."""
_MIN_COLUMNS = 20
"""Minimum columns of a curve for outliers to be detected."""


class Plot(Struct, frozen=True, kw_only=True, eq=False):
    """A drawn chart."""

    canvas: Canvas
    area: PlotArea | None
    """Position of the curves; None if there is no data."""
    x: AxisRange | None
    y: AxisRange | None
    """Range of the y axis (exponents of ten if ``log_y``), to pass to the next call of ``plot``."""

    def fraction(self, column: int) -> float:
        """Return where a column lies in the width of the curves: 0 to 1."""
        if self.area is None:
            return 1.0
        return min(1.0, max(0.0, (column - self.area.left + 0.5) / self.area.width))


def data_range(view_model: ChartViewModel | None) -> AxisRange | None:
    """Return the x range of all series and of ``x_ends``; None if there are no points."""
    if view_model is None:
        return None
    ends = [(float(s.x[0]), float(s.x[-1])) for s in view_model.series if s.x.size]
    if ends and view_model.x_ends is not None:
        ends.append(view_model.x_ends)
    ends = [(a, b) for a, b in ends if np.isfinite(a) and np.isfinite(b)]
    if not ends:
        return None
    low, high = min(a for a, _ in ends), max(b for _, b in ends)
    return AxisRange(low, high, is_final=view_model.x_is_final)


def plot(
    view_model: ChartViewModel | None,
    options: ChartOptions,
    width: int,
    height: int,
    before: AxisRange | None = None,
) -> Plot:
    """Draw ``view_model`` on ``width`` x ``height`` cells. ``before`` is the previous y range."""
    canvas = Canvas(max(1, width), max(1, height))
    data = data_range(view_model)
    if view_model is None or data is None:
        note = LOADING if view_model is None else view_model.note or "no data yet"
        _draw_note(canvas, note)
        return Plot(canvas=canvas, area=None, x=None, y=before)
    x = visible_range(options.view, data)
    layout = lay_out(canvas, view_model, options, x, before)
    area, y = layout.area, layout.y
    _draw_axes(canvas, view_model, options, layout, x)
    _draw_curves(canvas, layout, options)
    draw_marks(canvas, area, view_model.marks, x)
    has_room = area.left and area.height >= _LABEL_LINES
    if has_room and view_model.shows_values and options.cursor is None:
        _draw_end_values(canvas, layout, is_rate=view_model.is_rate)
    draw_selection(canvas, area, x, options.selection)
    draw_crosshair(canvas, area, view_model.marks, x, options.cursor)
    legend_end = draw_legend(canvas, view_model, options) if area.top else canvas.width
    if layout.extremes is None:
        note = "no values in this range" if options.view else view_model.note or "no values yet"
        _draw_note(canvas, f"{note}, on a log scale" if options.log_y else note)
    else:
        _draw_scale_note(canvas, area, legend_end, *scale_note(view_model, options, layout))
    return Plot(canvas=canvas, area=area, x=x, y=y)


class Layout(Struct, frozen=True, kw_only=True, eq=False):
    """Curves and ticks, and an area with a margin that is wide enough for the tick labels."""

    area: PlotArea
    curves: list[VisibleCurve]
    y: AxisRange
    ticks: list[AxisTick]
    extremes: tuple[float, float] | None


def lay_out(
    canvas: Canvas,
    view_model: ChartViewModel,
    options: ChartOptions,
    x: AxisRange,
    before: AxisRange | None,
) -> Layout:
    margin = MARGIN
    while True:
        area = PlotArea.within(canvas.width, canvas.height, margin)
        curves = [VisibleCurve(s, x, area, options.log_y) for s in view_model.series]
        extremes = _union([c.extremes for c in curves])
        if extremes is None:
            y = before or AxisRange(0.0, 1.0)
        else:
            y = _y_range(curves, extremes, view_model, options, before)
        most = max(2, min(8, area.height // 4 + 1))
        ticks = log_ticks(y, most) if options.log_y else linear_ticks(y, most)
        needed = max((cell_len(tick.label) for tick in ticks), default=0) + 1
        if needed <= margin or margin == MOST_MARGIN or not area.left:
            return Layout(area=area, curves=curves, y=y, ticks=ticks, extremes=extremes)
        margin = min(needed, MOST_MARGIN)


def _y_range(
    curves: Sequence[VisibleCurve],
    extremes: tuple[float, float],
    view_model: ChartViewModel,
    options: ChartOptions,
    before: AxisRange | None,
) -> AxisRange:
    if options.log_y:
        return sticky_log_range(*extremes, before)
    low, high = extremes
    if view_model.cut_outliers and not options.outliers:
        low, high = _without_outliers(curves, extremes, before)
    if view_model.is_rate and options.view is None and low > 0:
        low = 0.0
    y = sticky_range(low, high, before)
    slack = 1e-9 * y.span
    is_cut = extremes[0] < y.low - slack or extremes[1] > y.high + slack
    return y if is_cut == y.is_cut else replace(y, is_cut=is_cut)


def _union(ranges: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    finite = [r for r in ranges if r is not None]
    return (min(a for a, _ in finite), max(b for _, b in finite)) if finite else None


def _without_outliers(
    curves: Sequence[VisibleCurve], extremes: tuple[float, float], before: AxisRange | None
) -> tuple[float, float]:
    """Return the range of nearly all values and of the newest ones.

    Return ``extremes`` if cutting would hardly shorten the axis. An axis that already cuts goes on
    until cutting is almost useless, so that it does not change back and forth.
    """
    usual = _union([c.usual for c in curves])
    if usual is None or usual[1] - usual[0] <= NOISE * max(abs(usual[0]), abs(usual[1])):
        return extremes
    room = 0.25 * (usual[1] - usual[0])
    low, high = max(extremes[0], usual[0] - room), min(extremes[1], usual[1] + room)
    least = STILL_FLATTENED if before is not None and before.is_cut else FLATTENED
    return (low, high) if extremes[1] - extremes[0] > least * (high - low) else extremes


def scale_note(
    view_model: ChartViewModel, options: ChartOptions, layout: Layout
) -> tuple[str, str]:
    """Return what must be known to read the y axis correctly, and a word for it.

    Both are empty for a linear axis that shows all values.
    """
    if options.log_y:
        return ("log scale (y: switch to linear)" if view_model.log_y else "log scale"), "log"
    y, extremes = layout.y, layout.extremes
    if extremes is None or not y.is_cut:
        return "", ""
    below, above = extremes[0] < y.low, extremes[1] > y.high
    if below and above:
        cut = f"cut to {metric(y.low)} - {metric(y.high)}"
        return f"{cut}, values {metric(extremes[0])} - {metric(extremes[1])} (o shows all)", "cut"
    if above:
        return f"cut at {metric(y.high)}, highest {metric(extremes[1])} (o shows all)", "cut"
    return f"cut at {metric(y.low)}, lowest {metric(extremes[0])} (o shows all)", "cut"


def _draw_scale_note(canvas: Canvas, area: PlotArea, legend_end: int, note: str, word: str) -> None:
    """Write the note behind the legend, or its word below the labels of the y axis."""
    start = canvas.width - cell_len(note) - 1
    if note and start >= legend_end + 2:
        canvas.write(start, 0, note, INK_DIM)
    elif cell_len(word) < area.left:
        canvas.write(area.left - 1 - cell_len(word), area.top + area.height, word, INK_DIM)


class VisibleCurve:
    """A series reduced to the visible columns, on the scale of the axis."""

    def __init__(self, series: ChartSeries, x: AxisRange, area: PlotArea, log_y: bool) -> None:
        self.series = series
        self._x, self._dots, self._log = x, 2 * area.width, log_y
        self.line = self._columns(series.y)
        banded = series.low is not None and series.high is not None
        self.low = self._columns(series.low) if banded and series.low is not None else None
        self.high = self._columns(series.high) if banded and series.high is not None else None

    def _columns(self, y: FloatArray) -> braille.CurveColumns:
        columns = braille.decimate(
            self.series.x, y, self._x.low, self._x.high, self._dots, positive=self._log
        )
        if not self._log:
            return columns
        with np.errstate(invalid="ignore"):
            return braille.CurveColumns(
                at=columns.at,
                first=np.log10(columns.first),
                last=np.log10(columns.last),
                low=np.log10(columns.low),
                high=np.log10(columns.high),
            )

    @property
    def extremes(self) -> tuple[float, float] | None:
        """Minimum and maximum of the visible values; None if there are none."""
        lows, highs = self._bounds
        return (float(lows.min()), float(highs.max())) if lows.size else None

    @property
    def usual(self) -> tuple[float, float] | None:
        """Range without the extreme columns at both ends, but with the newest value."""
        lows, highs = self._bounds
        if lows.size < _MIN_COLUMNS:
            return self.extremes
        share = CUT_SHARE_FAINT if self.series.dim else CUT_SHARE
        cut = int(share * (lows.size - 1))
        low = float(np.partition(lows, cut)[cut])
        high = float(np.partition(highs, -1 - cut)[-1 - cut])
        newest = _visible_values(self.line, self.line.last, self._dots)
        if newest.size and not self.series.dim:
            low, high = min(low, float(newest[-1])), max(high, float(newest[-1]))
        return low, high

    @cached_property
    def _bounds(self) -> tuple[FloatArray, FloatArray]:
        """Return the minimum and maximum of each visible column."""
        parts = [c for c in (self.line, self.low, self.high) if c is not None]
        return (
            np.concatenate([_visible_values(part, part.low, self._dots) for part in parts]),
            np.concatenate([_visible_values(part, part.high, self._dots) for part in parts]),
        )


def _visible_values(curve: braille.CurveColumns, values: FloatArray, dots: int) -> FloatArray:
    """Return the finite values of the visible columns."""
    visible = values[(curve.at >= 0) & (curve.at < dots)]
    return visible[np.isfinite(visible)]


def _draw_note(canvas: Canvas, text: str) -> None:
    lines = wrap(text, max(1, canvas.width - 2))[: canvas.height]
    top = (canvas.height - len(lines)) // 2
    for row, line in enumerate(lines):
        canvas.write(max(0, (canvas.width - cell_len(line)) // 2), top + row, line, INK_DIM)


def _draw_axes(
    canvas: Canvas, view_model: ChartViewModel, options: ChartOptions, layout: Layout, x: AxisRange
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
            canvas.write(area.left, row, (GRID * area.width)[: area.width], INK_FAINT)
    draw_x_axis(canvas, area, view_model, x)


def _draw_curves(canvas: Canvas, layout: Layout, options: ChartOptions) -> None:
    area, y, curves = layout.area, layout.y, layout.curves
    size = (y.low, y.high, area.width, area.height)
    # Draw faint curves first, so that the important ones are on top.
    order = sorted(curves, key=lambda c: not c.series.dim)
    for curve in order:
        if curve.low is not None and curve.high is not None:
            dots = braille.band(curve.low, curve.high, *size)
            canvas.blit(area.left, area.top, dots, ink_of(curve.series, faint=True))
    for curve in order:
        dash = dash_of(curve.series.colour, dashes=options.dashes)
        dots = braille.line(curve.line, *size, dash=dash, thin=curve.series.dim)
        ink = ink_of(curve.series, faint=curve.series.dim)
        canvas.blit(area.left, area.top, dots, ink)
    for curve in order:
        if not curve.series.dim and (end := _end(area, curve.line, y)) is not None:
            canvas.write(*end, marker_of(curve.series), ink_of(curve.series))


def _end(area: PlotArea, line: braille.CurveColumns, y: AxisRange) -> tuple[int, int] | None:
    """Return the cell of the last value; None if the curve continues beyond the right edge."""
    inside = np.flatnonzero(np.isfinite(line.last) & (line.at >= 0))
    if not inside.size or line.at[inside[-1]] >= 2 * area.width:
        return None
    last = inside[-1]
    row = int(braille.rows_of(line.last[last : last + 1], y.low, y.high, 4 * area.height)[0]) // 4
    if not 0 <= row < area.height:
        return None
    return area.left + int(line.at[last]) // 2, area.top + row


def _draw_end_values(canvas: Canvas, layout: Layout, *, is_rate: bool) -> None:
    """Write the last value behind, above or below the sign of a curve, where it covers nothing."""
    area = layout.area
    for curve in layout.curves:
        end = _end(area, curve.line, layout.y)
        if curve.series.dim or end is None:
            continue
        text = value_text(curve.series, None, is_rate)
        x, row = end
        left = min(x, area.left + area.width - cell_len(text))
        for column, line in ((x + 2, row), (left, row - 1), (left, row + 1)):
            inside = area.top <= line < area.top + area.height
            inside = inside and area.left < column <= area.left + area.width - len(text)
            # One more cell on either side, so that the value does not touch a curve.
            if inside and not canvas.line(line)[column - 1 : column + len(text) + 1].strip(" ┈"):
                canvas.write(column, line, text, ink_of(curve.series))
                break


def nearest_x(series: Sequence[ChartSeries], x: float) -> float | None:
    """Return the ``x`` of the nearest point of any series, so that a crosshair is on data."""
    points = [p[0] for s in series if (p := value_at(s, x)) is not None]
    return min(points, key=lambda p: abs(p - x), default=None)


def next_x(series: Sequence[ChartSeries], x: float, direction: int) -> float | None:
    """Return the ``x`` of the next point of any series in ``direction``; None if there is none."""
    candidates = []
    for one in series:
        if direction > 0:
            index = int(np.searchsorted(one.x, x, side="right"))
        else:
            index = int(np.searchsorted(one.x, x, side="left")) - 1
        if 0 <= index < one.x.size:
            candidates.append(float(one.x[index]))
    if not candidates:
        return None
    return min(candidates) if direction > 0 else max(candidates)


def next_point(series: Sequence[ChartSeries], x: float, distance: float) -> float:
    """Return the data point at a distance from ``x``, or the next one if points are further
    apart."""
    direction = 1 if distance > 0 else -1
    nearest = nearest_x(series, x + distance)
    if nearest is not None and (nearest - x) * direction > 0:
        return nearest
    further = next_x(series, x, direction)
    return x if further is None else further


def mark_near(marks: Sequence[ChartMark], plotted: Plot, column: int, row: int) -> ChartMark | None:
    """Return the mark at a cell: its sign at the foot, or its line, one cell beside it too."""
    if plotted.x is None or plotted.area is None:
        return None
    at_foot = abs(row - (plotted.area.top + plotted.area.height - 1)) <= 1
    cell = plotted.x.span / plotted.area.width
    at = plotted.x.low + plotted.fraction(column) * plotted.x.span
    near = [m for m in marks if abs(m.at - at) <= 1.5 * cell and (m.line or at_foot)]
    return min(near, key=lambda mark: (not mark.line, abs(mark.at - at)), default=None)
