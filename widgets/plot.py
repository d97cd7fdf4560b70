"""A whole chart as a canvas of characters: curves, bands, axes, legend and read-out.

Pure: the same values give the same picture. What depends on the picture before (the range of the y
axis, which is kept while it fits) is handed in and given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len

from ltui.widgets import braille
from ltui.widgets.canvas import Canvas
from ltui.widgets.formats import duration, metric, significant
from ltui.widgets.palette import MARKERS
from ltui.widgets.scale import Range, calm_range, linear_ticks, log_ticks
from ltui.widgets.shapes import ChartShape, FloatArray, Series
from ltui.widgets.viewport import Viewport, visible

INK_TEXT, INK_DIM, INK_FAINT, INK_CURSOR, INK_SERIES = 0, 1, 2, 3, 4
"""Inks of the canvas. From INK_SERIES on: the curves' colours, then the same ones faint."""

MARGIN = 7
"""Cells for the labels of the y axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the person at the keyboard chose, apart from the data."""

    view: Viewport | None = None
    log_y: bool = False
    cursor: float | None = None
    """Where on the x axis the crosshair stands."""
    grid: bool = True
    dashes: bool = False
    """Tell curves apart by their dashes, where there is no colour."""
    colours: int = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plot:
    canvas: Canvas
    area: Area | None
    x: Range | None
    y: Range | None
    """Range of the y axis, as a power of ten where ``log_y``; hand it to the next ``plot``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Where on the canvas the curves are, in cells."""

    left: int
    top: int
    width: int
    height: int

    @classmethod
    def within(cls, width: int, height: int) -> Area:
        axes, legend = width >= 20 and height >= 4, height >= 6
        left = MARGIN if axes else 0
        right = 1 if axes else 0
        return cls(
            left=left,
            top=1 if legend else 0,
            width=max(1, width - left - right),
            height=max(1, height - (1 if legend else 0) - (1 if axes else 0)),
        )


def data_range(series: Sequence[Series]) -> Range | None:
    """From the first to the last ``x`` of any series; None where there is no point."""
    ends = [(s.x[0], s.x[-1]) for s in series if s.x.size]
    ends = [(a, b) for a, b in ends if np.isfinite(a) and np.isfinite(b)]
    if not ends:
        return None
    return Range(float(min(a for a, _ in ends)), float(max(b for _, b in ends)))


def plot(
    shape: ChartShape | None, look: Look, width: int, height: int, before: Range | None = None
) -> Plot:
    """Draw ``shape`` on ``width`` x ``height`` cells."""
    canvas = Canvas(max(1, width), max(1, height))
    data = data_range(shape.series) if shape else None
    if shape is None or data is None:
        _note(canvas, shape.note if shape and shape.note else "no data yet")
        return Plot(canvas=canvas, area=None, x=None, y=before)
    area = Area.within(canvas.width, canvas.height)
    x = visible(look.view, data)
    curves = [_Curve(s, x, area, look.log_y) for s in shape.series]
    extremes = [c.extremes for c in curves if c.extremes is not None]
    if not extremes:
        y = before or Range(0.0, 1.0)
        note = "nothing in this part" if look.view else shape.note or "no values yet"
        _note(canvas, f"{note}, on a log scale" if look.log_y else note)
    else:
        parts = 5 if look.log_y else 10
        y = calm_range(
            min(a for a, _ in extremes), max(b for _, b in extremes), before, parts=parts
        )
    _axes(canvas, area, shape, look, x, y)
    _curves(canvas, area, curves, y, look)
    if look.cursor is not None and x.low <= look.cursor <= x.high:
        _crosshair(canvas, area, x, look.cursor)
    if area.top:
        _legend(canvas, shape, look)
    return Plot(canvas=canvas, area=area, x=x, y=y)


class _Curve:
    """A series reduced to the columns in view, on the scale of the axis."""

    def __init__(self, series: Series, x: Range, area: Area, log_y: bool) -> None:
        self.series = series
        self._x, self._dots, self._log = x, 2 * area.width, log_y
        self.line = self._columns(series.y)
        banded = series.low is not None and series.high is not None
        self.low = self._columns(series.low) if banded and series.low is not None else None
        self.high = self._columns(series.high) if banded and series.high is not None else None

    def _columns(self, y: FloatArray) -> braille.Columns:
        found = braille.decimate(
            self.series.x, y, self._x.low, self._x.high, self._dots, positive=self._log
        )
        if not self._log:
            return found
        with np.errstate(invalid="ignore"):
            return braille.Columns(
                at=found.at,
                first=np.log10(found.first),
                last=np.log10(found.last),
                low=np.log10(found.low),
                high=np.log10(found.high),
            )

    @property
    def extremes(self) -> tuple[float, float] | None:
        parts = [c for c in (self.line, self.low, self.high) if c is not None]
        lows, highs = [], []
        for part in parts:
            inside = (part.at >= 0) & (part.at < self._dots)
            low, high = part.low[inside], part.high[inside]
            lows.append(low[np.isfinite(low)])
            highs.append(high[np.isfinite(high)])
        low, high = np.concatenate(lows), np.concatenate(highs)
        return (float(low.min()), float(high.max())) if low.size else None


def _note(canvas: Canvas, text: str) -> None:
    x = max(0, (canvas.width - cell_len(text)) // 2)
    canvas.write(x, (canvas.height - 1) // 2, text, INK_DIM)


def _axes(canvas: Canvas, area: Area, shape: ChartShape, look: Look, x: Range, y: Range) -> None:
    if not area.left:
        return
    most = max(2, min(8, area.height // 4 + 1))
    ticks = log_ticks(y, most) if look.log_y else linear_ticks(y, most)
    for tick in ticks:
        row = (
            area.top + int(braille.rows_of(np.array(tick.at), y.low, y.high, 4 * area.height)) // 4
        )
        canvas.write(0, row, tick.label.rjust(area.left - 1)[: area.left - 1], INK_DIM)
        if look.grid:
            canvas.write(area.left, row, "┈" * area.width, INK_FAINT)
    _x_axis(canvas, area, shape, x)


def _x_axis(canvas: Canvas, area: Area, shape: ChartShape, x: Range) -> None:
    row = area.top + area.height
    name = shape.x_label
    # The name stands at the right end, where the numbers leave room for it.
    free = area.left + area.width - cell_len(name) - 1 if name else canvas.width
    if area.width < 30:
        free, name = canvas.width, ""
    canvas.write(free + 1, row, name, INK_DIM)
    end = area.left - 2
    for tick in linear_ticks(x, max(2, area.width // 14), time=shape.x_time):
        place = area.left + column(tick.at, x, area.width)
        start = max(area.left, place - cell_len(tick.label) // 2)
        if start <= end + 1 or start + cell_len(tick.label) > free:
            continue
        end = canvas.write(start, row, tick.label, INK_DIM)


def column(at: float, x: Range, width: int) -> int:
    """The cell in which ``at`` lies."""
    if x.span <= 0:
        return 0
    return min(width - 1, max(0, int((at - x.low) / x.span * width)))


def _curves(canvas: Canvas, area: Area, curves: list[_Curve], y: Range, look: Look) -> None:
    size = (y.low, y.high, area.width, area.height)
    # Faint ones first, so that what matters lies on top.
    order = sorted(curves, key=lambda c: not c.series.dim)
    for curve in order:
        if curve.low is not None and curve.high is not None:
            dots = braille.band(curve.low, curve.high, *size)
            canvas.blit(area.left, area.top, dots, braille.BLANK, ink_of(curve.series, look, True))
    for curve in order:
        dash = curve.series.colour % 4 if look.dashes else 0
        dots = braille.line(curve.line, *size, dash=dash)
        ink = ink_of(curve.series, look, curve.series.dim)
        canvas.blit(area.left, area.top, dots, braille.BLANK, ink)
    for curve in order:
        if not curve.series.dim:
            _end_marker(canvas, area, curve, y, look)


def ink_of(series: Series, look: Look, faint: bool) -> int:
    return INK_SERIES + series.colour % look.colours + (look.colours if faint else 0)


def marker_of(series: Series) -> str:
    return "·" if series.dim else MARKERS[series.colour % len(MARKERS)]


def _end_marker(canvas: Canvas, area: Area, curve: _Curve, y: Range, look: Look) -> None:
    """A sign at the last value in view, but not where the curve runs on beyond the right edge."""
    line = curve.line
    inside = np.flatnonzero(np.isfinite(line.last) & (line.at >= 0))
    if not inside.size or line.at[inside[-1]] >= 2 * area.width:
        return
    last = inside[-1]
    row = int(braille.rows_of(line.last[last : last + 1], y.low, y.high, 4 * area.height)[0]) // 4
    if 0 <= row < area.height:
        x = area.left + int(line.at[last]) // 2
        canvas.write(x, area.top + row, marker_of(curve.series), ink_of(curve.series, look, False))


def _crosshair(canvas: Canvas, area: Area, x: Range, cursor: float) -> None:
    place = area.left + column(cursor, x, area.width)
    for row in range(area.top, area.top + area.height):
        if chr(canvas.chars[row, place]) in " ┈":
            canvas.write(place, row, "│", INK_CURSOR)


def value_at(series: Series, x: float) -> tuple[float, float] | None:
    """The point nearest to ``x``; None for an empty series. A gap gives a NaN value."""
    if not series.x.size:
        return None
    right = int(np.searchsorted(series.x, x))
    near = [i for i in (right - 1, right) if 0 <= i < series.x.size]
    best = min(near, key=lambda i: abs(float(series.x[i]) - x))
    return float(series.x[best]), float(series.y[best])


def nearest_x(series: Sequence[Series], x: float) -> float | None:
    """The ``x`` of the point of any series that is nearest, so that a crosshair stands on data."""
    points = [p[0] for s in series if (p := value_at(s, x)) is not None]
    return min(points, key=lambda p: abs(p - x), default=None)


def next_x(series: Sequence[Series], x: float, direction: int) -> float | None:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One curve in the legend: its sign, and what of name and value there is room for."""

    series: Series
    name: str
    value: str

    @property
    def text(self) -> str:
        return " ".join(part for part in (marker_of(self.series), self.name, self.value) if part)


def _legend(canvas: Canvas, shape: ChartShape, look: Look) -> None:
    """Names and values: of the last points, or of those under the crosshair."""
    x = 1
    if look.cursor is not None:
        place = duration(look.cursor) if shape.x_time else tick_text(look.cursor)
        unit = "" if shape.x_time else f"{shape.x_label} "
        x = canvas.write(x, 0, f"{unit}{place}", INK_TEXT) + len(_LEGEND_GAP)
    # Where not all find room, faint curves are the first to be left out.
    ordered = sorted(shape.series, key=lambda s: s.dim)
    entries = [_Entry(series=s, name=s.name, value=_value_text(s, look.cursor)) for s in ordered]
    if _legend_width(entries) > canvas.width - x and look.cursor is not None:
        entries = [replace(e, name="") for e in entries]
    # Values of bold curves stay longest: what a loss is now is what one looks for.
    for i in reversed(range(len(entries))):
        if _legend_width(entries) > canvas.width - x and look.cursor is None:
            entries[i] = replace(entries[i], value="")
    shown = len(entries)
    while shown and _legend_width(entries[:shown], len(entries) - shown) > canvas.width - x:
        shown -= 1
    for entry in entries[:shown]:
        end = canvas.write(x, 0, entry.text, INK_DIM)
        canvas.write(x, 0, marker_of(entry.series), ink_of(entry.series, look, entry.series.dim))
        canvas.write(end - cell_len(entry.value), 0, entry.value, INK_TEXT)
        x = end + len(_LEGEND_GAP)
    if shown < len(entries):
        canvas.write(x, 0, f"+{len(entries) - shown}", INK_DIM)


_LEGEND_GAP = "   "


def _legend_width(entries: Sequence[_Entry], left_out: int = 0) -> int:
    texts = [e.text for e in entries] + ([f"+{left_out}"] if left_out else [])
    return sum(cell_len(t) for t in texts) + len(_LEGEND_GAP) * max(0, len(texts) - 1)


def tick_text(x: float) -> str:
    return f"{round(x):,}".replace(",", "\N{THIN SPACE}") if x == round(x) else significant(x, 4)


def _value_text(series: Series, cursor: float | None) -> str:
    if cursor is not None:
        found = value_at(series, cursor)
        return metric(found[1] if found else None)
    finite = np.flatnonzero(np.isfinite(series.y[-1000:]))
    if not finite.size:
        return metric(None)
    return metric(float(series.y[-1000:][finite[-1]]))
