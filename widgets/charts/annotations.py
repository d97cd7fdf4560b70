"""What surrounds the curves of a chart: the legend above them, and the x axis below them.

The legend has the names and values of the series in one line. The x axis has labels, marks of
events, the crosshair and the selection. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len, set_cell_size

from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import AxisRange, clock_label, linear_ticks
from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.charts.chart_options import (
    INK_CURSOR,
    INK_DIM,
    INK_FAINT,
    INK_TEXT,
    ChartOptions,
    ink_of,
    marker_of,
)
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel

_GAP = "   "
_LEAST_NAME = 8
"""Minimum cells of a shortened name; if that does not fit, an entry is omitted."""


class _Entry(Struct, frozen=True, kw_only=True):
    """The legend of one series: its sign, name and value."""

    series: ChartSeries
    name: str
    value: str

    @property
    def text(self) -> str:
        return " ".join(part for part in (marker_of(self.series), self.name, self.value) if part)


def draw_legend(canvas: Canvas, view_model: ChartViewModel, options: ChartOptions) -> int:
    """Draw names and values: of the last points, or of the points at the crosshair.

    Return the column behind them.
    """
    x = 1
    has_values = view_model.shows_values or options.cursor is not None
    if not has_values and len(view_model.series) == 1:
        return 0
    if options.cursor is not None:
        x = canvas.write(x, 0, position_text(view_model, options.cursor), INK_TEXT) + len(_GAP)
    # If not all fit, the entries of faint curves are omitted first.
    ordered = sorted(view_model.series, key=lambda s: s.dim)
    entries = [
        _Entry(
            series=s,
            name=s.name,
            value=value_text(s, options.cursor, view_model.is_rate) if has_values else "",
        )
        for s in ordered
    ]
    shown = _fitting(entries, canvas.width - x, names=options.cursor is None)
    for entry in shown:
        end = canvas.write(x, 0, entry.text, INK_DIM)
        canvas.write(x, 0, marker_of(entry.series), ink_of(entry.series, faint=entry.series.dim))
        canvas.write(end - cell_len(entry.value), 0, entry.value, INK_TEXT)
        x = end + len(_GAP)
    left_out = sum(not s.dim for s in ordered) - sum(not e.series.dim for e in shown)
    if left_out > 0:
        return canvas.write(x, 0, f"+{left_out}", INK_DIM)
    return x - len(_GAP)


def _fitting(entries: Sequence[_Entry], room: int, *, names: bool) -> list[_Entry]:
    """Return the entries that fit: without faint curves, with short names, then fewer entries.

    Values are never shortened, because the present loss is what the user wants to read. With a
    crosshair (``names`` is False) no value is omitted; if necessary, the names are.
    """
    clear = [e for e in entries if not e.series.dim] or list(entries)
    plain = [replace(e, name=e.name.removesuffix(e.series.suffix)) for e in clear]
    for shown in (list(entries), clear, plain):
        if _width(shown) <= room:
            return shown
    clear = plain
    if not names and (short := _shortened(clear, room)) is not None:
        return short
    if not names:
        clear = [replace(e, name="") for e in clear]
    for count in range(len(clear), 0, -1):
        short = _shortened(clear[:count], room - (0 if count == len(clear) else len(_GAP) + 3))
        if short is not None:
            return short
    return [replace(clear[0], value="")] if names else []


def _shortened(entries: Sequence[_Entry], room: int) -> list[_Entry] | None:
    """Return the entries with names cut to one width; None if they do not fit at the minimum."""
    longest = max(cell_len(e.name) for e in entries)
    for cells in range(longest, min(longest, _LEAST_NAME) - 1, -1):
        cut = [replace(e, name=_cut(e.name, cells)) for e in entries]
        if _width(cut) <= room:
            return cut
    return None


def _cut(name: str, cells: int) -> str:
    """Cut a name in the middle, because related names often differ only at their ends."""
    if cell_len(name) <= cells:
        return name
    head = set_cell_size(name, cells // 2).rstrip()
    tail = name[::-1]
    while cell_len(tail) > cells - 1 - cell_len(head):
        tail = tail[:-1]
    return f"{head}…{tail[::-1]}"


def _width(entries: Sequence[_Entry]) -> int:
    return sum(cell_len(e.text) for e in entries) + len(_GAP) * max(0, len(entries) - 1)


def value_at(series: ChartSeries, x: float) -> tuple[float, float] | None:
    """Return the point nearest to ``x``; None if the series is empty. At a gap the value is NaN."""
    if not series.x.size:
        return None
    right = int(np.searchsorted(series.x, x))
    near = [i for i in (right - 1, right) if 0 <= i < series.x.size]
    best = min(near, key=lambda i: abs(float(series.x[i]) - x))
    return float(series.x[best]), float(series.y[best])


def value_text(series: ChartSeries, cursor: float | None, is_rate: bool = False) -> str:
    """Return the value at the crosshair, or the newest one."""
    if cursor is not None:
        point = value_at(series, cursor)
        value = point[1] if point else None
    else:
        value = float(series.y[-1]) if series.y.size else None
    if value is not None and not series.is_logged and not np.isfinite(value):
        return formats.NA
    return formats.rate(value, "") if is_rate else formats.metric(value)


def position_text(view_model: ChartViewModel, x: float) -> str:
    """Return a position on the x axis: ``step 1 200``, ``5 m 00 s``, ``22 Nov 14:30:05``."""
    if view_model.x_clock:
        return clock_label(x)
    if view_model.x_time:
        return formats.duration(x)
    digits = formats.count(x) if x == round(x) else formats.significant(x, 4)
    return f"{view_model.x_label} {digits}"


MARGIN = 7
"""Usual number of cells for the labels of the y axis."""
_MOST_MARKS = 0.2
"""Maximum fraction of the columns with one sign of marks that have no line, such as epochs."""


class PlotArea(Struct, frozen=True, kw_only=True):
    """The part of the canvas in which curves are drawn, in cells."""

    left: int
    top: int
    width: int
    height: int

    @classmethod
    def within(cls, width: int, height: int, margin: int = MARGIN) -> PlotArea:
        """Return the area in a canvas of this size; small canvases have no axes or no legend."""
        axes, legend = width >= 20 and height >= 4, height >= 5
        left = margin if axes else 0
        right = 1 if axes else 0
        return cls(
            left=left,
            top=1 if legend else 0,
            width=max(1, width - left - right),
            height=max(1, height - (1 if legend else 0) - (1 if axes else 0)),
        )


def column(at: float, x: AxisRange, width: int) -> int:
    """Return the column of cells that contains ``at``."""
    if x.span <= 0:
        return 0
    return min(width - 1, max(0, int((at - x.low) / x.span * width)))


def draw_x_axis(canvas: Canvas, area: PlotArea, view_model: ChartViewModel, x: AxisRange) -> None:
    """Write the labels and the name of the axis below the area."""
    row = area.top + area.height
    name = view_model.x_label
    # The name of the axis is at the right end, if the tick labels leave space for it.
    free = area.left + area.width - cell_len(name) - 1 if name else canvas.width
    if area.width < 30:
        free, name = canvas.width, ""
    canvas.write(free + 1, row, name, INK_DIM)
    end = area.left - 2
    most = max(2, area.width // 14)
    for tick in linear_ticks(
        x, most, time=view_model.x_time, whole=view_model.x_whole, clock=view_model.x_clock
    ):
        center = area.left + column(tick.at, x, area.width)
        start = max(area.left, center - cell_len(tick.label) // 2)
        if start <= end + 1 or start + cell_len(tick.label) > free:
            continue
        end = canvas.write(start, row, tick.label, INK_DIM)


def draw_marks(canvas: Canvas, area: PlotArea, marks: Sequence[ChartMark], x: AxisRange) -> None:
    """Draw the signs of the visible marks at the foot of the area, and their lines.

    Signs without lines are omitted if there are many of one kind, as of hundreds of epochs.
    """
    visible = [
        (area.left + column(m.at, x, area.width), m) for m in marks if x.low <= m.at <= x.high
    ]
    cells: dict[str, set[int]] = {}
    for cell, mark in visible:
        if mark.line:
            _draw_line(canvas, area, cell, "┊", INK_FAINT)
        else:
            cells.setdefault(mark.sign, set()).add(cell)
    crowded = {sign for sign, at in cells.items() if len(at) > _MOST_MARKS * area.width}
    foot = area.top + area.height - 1
    # What is rarer than an epoch is drawn over it.
    for cell, mark in sorted(
        visible, key=lambda one: (one[1].line, -len(cells.get(one[1].sign, ())))
    ):
        if mark.line or mark.sign not in crowded:
            canvas.write(cell, foot, mark.sign, INK_TEXT)


def draw_selection(
    canvas: Canvas, area: PlotArea, x: AxisRange, selection: tuple[float, float] | None
) -> None:
    """Draw a line at both ends of the range that the user selects."""
    for end in selection or ():
        _draw_line(canvas, area, area.left + column(end, x, area.width), "│", INK_CURSOR)


def draw_crosshair(
    canvas: Canvas, area: PlotArea, marks: Sequence[ChartMark], x: AxisRange, cursor: float | None
) -> None:
    """Draw the crosshair, and the text of a mark in its column."""
    if cursor is None or not x.low <= cursor <= x.high:
        return
    cell = area.left + column(cursor, x, area.width)
    _draw_line(canvas, area, cell, "│", INK_CURSOR)
    mark = mark_at(marks, cursor, x, area.width)
    if mark is None:
        return
    room_right, room_left = area.left + area.width - cell - 2, cell - area.left - 1
    foot = area.top + area.height - 1
    if cell_len(mark.text) <= room_right or room_right >= room_left:
        canvas.write(cell + 2, foot, _cut_end(mark.text, room_right), INK_TEXT)
    else:
        text = _cut_end(mark.text, room_left)
        canvas.write(cell - 1 - cell_len(text), foot, text, INK_TEXT)


def mark_at(
    marks: Sequence[ChartMark], cursor: float, x: AxisRange, width: int
) -> ChartMark | None:
    """Return the mark in the crosshair's column that is nearest to it."""
    cell = column(cursor, x, width)
    near = [m for m in marks if x.low <= m.at <= x.high and column(m.at, x, width) == cell]
    # At the same place, a mark with a line is more important than a checkpoint or an epoch.
    return min(near, key=lambda m: (abs(m.at - cursor), not m.line), default=None)


def _cut_end(text: str, room: int) -> str:
    return text if cell_len(text) <= room else f"{text[: max(0, room - 1)]}…"


def _draw_line(canvas: Canvas, area: PlotArea, cell: int, sign: str, ink: int) -> None:
    for row in range(area.top, area.top + area.height):
        if chr(canvas.chars[row, cell]) in " ┈┊":
            canvas.write(cell, row, sign, ink)
