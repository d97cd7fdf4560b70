"""Draw what belongs to the x axis of a chart: labels, marks of events, crosshair and selection.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.cells import cell_len

from ltui.widgets.charts.axis_scale import AxisRange, linear_ticks
from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.charts.chart_options import INK_CURSOR, INK_DIM, INK_FAINT, INK_TEXT
from ltui.widgets.view_models import ChartMark, ChartViewModel

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
        canvas.write(cell + 2, foot, _cut(mark.text, room_right), INK_TEXT)
    else:
        text = _cut(mark.text, room_left)
        canvas.write(cell - 1 - cell_len(text), foot, text, INK_TEXT)


def mark_at(
    marks: Sequence[ChartMark], cursor: float, x: AxisRange, width: int
) -> ChartMark | None:
    """Return the mark in the crosshair's column that is nearest to it."""
    cell = column(cursor, x, width)
    near = [m for m in marks if x.low <= m.at <= x.high and column(m.at, x, width) == cell]
    # At the same place, a mark with a line is more important than a checkpoint or an epoch.
    return min(near, key=lambda m: (abs(m.at - cursor), not m.line), default=None)


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else f"{text[: max(0, room - 1)]}…"


def _draw_line(canvas: Canvas, area: PlotArea, cell: int, sign: str, ink: int) -> None:
    for row in range(area.top, area.top + area.height):
        if chr(canvas.chars[row, cell]) in " ┈┊":
            canvas.write(cell, row, sign, ink)
