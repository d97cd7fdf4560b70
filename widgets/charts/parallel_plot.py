"""Draw parallel coordinates on a canvas: one vertical axis for each quantity, a line for each run.

Pure: the same values give the same canvas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len

from ltui.widgets.charts import braille
from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.charts.chart_options import (
    COLOURS,
    INK_DIM,
    INK_SERIES,
    INK_TEXT,
    dash_of,
    sign_of,
)
from ltui.widgets.columns import shortened

MIN_SPACING = 12
"""Minimum cells between two axes: a line, and the labels of the axis."""
MAX_SPACING = 32
MAX_LABEL = 10
"""Maximum cells of a label beside an axis."""


class ParallelAxis(Struct, frozen=True, kw_only=True):
    """One vertical axis."""

    title: str
    ticks: tuple[tuple[float, str], ...]
    """Places, from 0 at the foot to 1 at the top, and their labels."""


class ParallelLine(Struct, frozen=True, kw_only=True):
    """The line of one run."""

    key: str
    name: str
    colour: int
    """Index of colour and sign, as of a series of a chart."""
    places: tuple[float, ...]
    """The place on each axis, from 0 to 1."""


class ParallelViewModel(Struct, frozen=True, kw_only=True):
    """Everything that a plot of parallel coordinates draws."""

    axes: tuple[ParallelAxis, ...] = ()
    """The last axis is always visible."""
    lines: tuple[ParallelLine, ...] = ()
    note: str = "no runs to show"
    """Text in the middle if there are no axes or no lines."""

    @property
    def is_drawable(self) -> bool:
        """True if there are two axes and a line between them."""
        return len(self.axes) > 1 and bool(self.lines)

    def first_axis(self, wanted: int, width: int) -> int:
        """Return ``wanted``, or the last axis from which on all others fit into ``width`` cells."""
        return max(0, min(wanted, len(self.axes) - 1 - self._fitting(width)))

    def part(self, first: int, width: int) -> ParallelViewModel:
        """Return the axes from ``first`` on that fit into ``width`` cells, and the last one.

        Arrows before the titles say where there are more.
        """
        end = first + self._fitting(width)
        chosen = [*range(first, end), len(self.axes) - 1]
        axes = [self.axes[number] for number in chosen]
        for place, is_more in ((0, first > 0), (-1, end < len(self.axes) - 1)):
            if is_more:
                sign = "▸" if place else "◂"
                axes[place] = replace(axes[place], title=f"{sign} {axes[place].title}")
        return replace(
            self,
            axes=tuple(axes),
            lines=tuple(
                replace(line, places=tuple(line.places[i] for i in chosen)) for line in self.lines
            ),
        )

    def _fitting(self, width: int) -> int:
        """Return how many axes fit beside the last one."""
        return min(len(self.axes) - 1, max(1, (width - MAX_LABEL) // MIN_SPACING))


class ParallelArea(Struct, frozen=True):
    """Where the axes are on the canvas."""

    columns: tuple[int, ...]
    """The column of each axis."""
    width: int
    height: int

    def row(self, place: float) -> int:
        """Return the row of a place below the line of titles."""
        return 1 + int(braille.rows_of(np.array(place), 0.0, 1.0, 4 * self.height)) // 4


def lay_out(view_model: ParallelViewModel, width: int, height: int) -> ParallelArea:
    """Return where the axes of ``view_model`` are on ``width`` x ``height`` cells."""
    labels = [cell_len(text) for _, text in view_model.axes[-1].ticks]
    right = 3 + min(MAX_LABEL, max(labels, default=0))
    gaps = max(1, len(view_model.axes) - 1)
    spacing = max(1, min(MAX_SPACING, (width - right - 2) // gaps))
    columns = tuple(1 + number * spacing for number in range(len(view_model.axes)))
    return ParallelArea(columns, columns[-1] + 1, max(1, height - 1))


def parallel_plot(
    view_model: ParallelViewModel,
    width: int,
    height: int,
    *,
    highlighted: Collection[str] = (),
    dashes: bool = False,
) -> Canvas:
    """Draw all axes on ``width`` x ``height`` cells. The ``highlighted`` lines are thick and on
    top, the others then faint; with ``dashes`` those differ without colour."""
    canvas = Canvas(max(1, width), max(1, height))
    if not view_model.is_drawable:
        text = shortened(view_model.note, canvas.width)
        canvas.write((canvas.width - cell_len(text)) // 2, (canvas.height - 1) // 2, text, INK_DIM)
        return canvas
    area = lay_out(view_model, canvas.width, canvas.height)
    chosen = [line for line in view_model.lines if line.key in highlighted]
    others = [line for line in view_model.lines if line.key not in highlighted]
    for line in others:
        _draw_line(canvas, area, line, faint=bool(chosen), dashes=dashes)
    for column in area.columns:
        for row in range(1, canvas.height):
            canvas.write(column, row, "│", INK_DIM)
    for line in chosen:
        _draw_line(canvas, area, line, thick=True)
    for number, axis in enumerate(view_model.axes):
        _draw_axis(canvas, area, axis, number, chosen)
    for line in (*others, *chosen):
        ink = _ink(line, faint=bool(chosen) and line not in chosen)
        canvas.write(area.columns[-1] + 1, area.row(line.places[-1]), sign_of(line.colour), ink)
    _draw_titles(canvas, area, [axis.title for axis in view_model.axes])
    for line in chosen:
        for column, place in zip(area.columns, line.places, strict=True):
            canvas.write(column, area.row(place), sign_of(line.colour), _ink(line))
    return canvas


def nearest_line(
    view_model: ParallelViewModel, width: int, height: int, x: int, y: int
) -> str | None:
    """Return the key of the line that is nearest to a cell; None if there is none."""
    if not view_model.is_drawable:
        return None
    area = lay_out(view_model, width, height)
    distances = {
        line.key: abs(area.row(float(np.interp(x, area.columns, line.places))) - y)
        for line in view_model.lines
    }
    return min(distances, key=lambda key: distances[key])


def _ink(line: ParallelLine, *, faint: bool = False) -> int:
    return INK_SERIES + line.colour % COLOURS + (COLOURS if faint else 0)


def _draw_line(
    canvas: Canvas,
    area: ParallelArea,
    line: ParallelLine,
    *,
    faint: bool = False,
    thick: bool = False,
    dashes: bool = False,
) -> None:
    at = 2.0 * np.array(area.columns)
    dot = 1.0 / max(1, 4 * area.height - 1)
    dash = dash_of(line.colour, dashes=dashes)
    codes = None
    for shift in (0.0, -dot) if thick else (0.0,):
        y = np.clip(np.array(line.places) + shift, 0.0, 1.0)
        curve = braille.CurveColumns(at=at, first=y, last=y, low=y, high=y)
        drawn = braille.line(curve, 0.0, 1.0, area.width, area.height, dash=dash)
        # The bits of a code point of braille are its dots.
        codes = drawn if codes is None else codes | drawn
    assert codes is not None
    # A terminal may be smaller than the area.
    visible = codes[: canvas.height - 1, : canvas.width]
    canvas.blit(0, 1, visible, _ink(line, faint=faint))


def _draw_titles(canvas: Canvas, area: ParallelArea, titles: Sequence[str]) -> None:
    """Write the titles above their axes, the last one with its end below the labels' end."""
    last = shortened(titles[-1], max(1, canvas.width - area.columns[-2] - 4))
    right = min(area.columns[-1], canvas.width - cell_len(last))
    starts = [*area.columns[:-1], right]
    for number, title in enumerate((*titles[:-1], last)):
        end = canvas.width if number == len(titles) - 1 else starts[number + 1] - 1
        canvas.write(starts[number], 0, shortened(title, max(1, end - starts[number])), INK_TEXT)


def _draw_axis(
    canvas: Canvas,
    area: ParallelArea,
    axis: ParallelAxis,
    number: int,
    chosen: Sequence[ParallelLine],
) -> None:
    column = area.columns[number]
    is_last = number == len(area.columns) - 1
    room = canvas.width - column if is_last else area.columns[number + 1] - column - 1
    # A sign is between the last axis and its labels.
    gap = 3 if is_last else 1
    highlighted = {area.row(line.places[number]) for line in chosen}
    taken: set[int] = set()
    # Labels of the highlighted lines come first, then those of both ends.
    for place, text in sorted(
        axis.ticks, key=lambda tick: (area.row(tick[0]) not in highlighted, -abs(tick[0] - 0.5))
    ):
        row = area.row(place)
        if row not in taken:
            taken.add(row)
            label = shortened(text, min(MAX_LABEL, max(1, room - gap)))
            ink = INK_TEXT if row in highlighted else INK_DIM
            canvas.write(column + gap, row, label, ink)
