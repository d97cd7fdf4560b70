"""Many GPUs at one glance: a strip of the last minutes each, in as many columns as fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.segment import Segment
from textual.geometry import Region
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from ltui.widgets.bars import strip
from ltui.widgets.formats import duration
from ltui.widgets.gpu_table import SIGNS
from ltui.widgets.palette import LineStyles, line_styles
from ltui.widgets.view_models import GpuRow, Tone

LEAST_WIDTH = 22
"""Of one GPU's place: sign, number, a strip worth reading, a percentage."""
NARROW_WIDTH = 12
"""The same where GPUs are so many that they would take more lines than there are."""
GAP = 2
_TEXT = 5
_LOW, _HIGH = 0.34, 0.67


class GpuHeat(Widget):
    """A legend, then a strip for each GPU: tall and bright blocks are times of high utilisation."""

    DEFAULT_CSS = """
    GpuHeat { height: auto; width: 1fr; }
    """
    can_focus = False

    rows: reactive[tuple[GpuRow, ...]] = reactive((), repaint=False)
    most_lines: reactive[int] = reactive(8, repaint=False)
    """Lines of strips, without the legend; GPUs stand beside each other if they are more."""
    block_s: reactive[float] = reactive(0.0, repaint=False)
    """Seconds that a block stands for."""

    def show(self, rows: Sequence[GpuRow], most_lines: int, block_s: float) -> None:
        """Draw ``rows`` in at most so many lines below the legend, as far as the width allows."""
        rows = tuple(rows)
        self.block_s = block_s
        layout = len(rows) != len(self.rows) or most_lines != self.most_lines
        if layout or rows != self.rows:
            self.most_lines = most_lines
            self.rows = rows
            self.refresh(layout=layout)

    def grid(self, width: int) -> tuple[int, int]:
        """Columns and lines for this many GPUs in ``width`` cells."""
        count = len(self.rows)
        if not count:
            return 1, 0
        fitting = max(1, (width + GAP) // (LEAST_WIDTH + GAP))
        if math.ceil(count / fitting) > self.most_lines:
            fitting = max(1, (width + GAP) // (NARROW_WIDTH + GAP))
        columns = min(fitting, max(1, math.ceil(count / max(1, self.most_lines))))
        return columns, math.ceil(count / columns)

    def get_content_height(self, container: object, viewport: object, width: int) -> int:  # noqa: ARG002
        return self.lines(width)

    def lines(self, width: int) -> int:
        """Lines in all, the legend included."""
        return self.grid(width)[1] + 1 if self.rows else 0

    def render_lines(self, crop: Region) -> list[Strip]:
        self._paint = line_styles(self.app)
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base, paint = self.rich_style, self._paint
        columns, lines = self.grid(width)
        if y > lines or not lines:
            return Strip.blank(width, base)
        room = (width - GAP * (columns - 1)) // columns
        if y == 0:
            text = self._legend(room)
            return Strip([Segment(text, base + paint.title)]).adjust_cell_length(width, base)
        y -= 1
        segments: list[Segment] = []
        for column in range(columns):
            index = column * lines + y
            if index >= len(self.rows):
                break
            if column:
                segments.append(Segment(" " * GAP, base))
            segments += _place(self.rows[index], room, self._label_width(), paint)
        drawn = [Segment(s.text, base + s.style if s.style else base) for s in segments]
        return Strip(drawn).adjust_cell_length(width, base)

    def _legend(self, room: int) -> str:
        """What the blocks mean, and the time that a strip covers."""
        cells = max(1, room - self._label_width() - 3 - _TEXT)
        points = max((len(row.heat) for row in self.rows), default=0)
        covered = min(cells, points) * self.block_s
        span = f"utilisation, last {duration(round(covered))}" if covered else "utilisation"
        return f"  {span}   ▁ 0 %  ▇ 100 %"

    def _label_width(self) -> int:
        return max((len(row.index) for row in self.rows), default=1)


def _place(row: GpuRow, width: int, label: int, paint: LineStyles) -> list[Segment]:
    sign = SIGNS.get(row.tone, " ")
    room = max(1, width - label - 3 - _TEXT)
    return [
        Segment(f"{sign} ", paint.of(row.tone)),
        Segment(f"{row.index:>{label}} ", paint.of(Tone.PLAIN)),
        *_shades(row.heat, room, paint),
        Segment(row.utilisation_text.rjust(_TEXT), paint.of(Tone.PLAIN)),
    ]


def _shades(values: Sequence[float], width: int, paint: LineStyles) -> list[Segment]:
    """The strip, quiet times nearer to the background; runs of one shade are one segment."""
    shown = list(values)[-width:]
    text = strip(shown, width, high=1.0)
    shades = [Tone.FAINT] * (width - len(shown)) + [_shade(v) for v in shown]
    segments: list[Segment] = []
    start = 0
    for end in range(1, width + 1):
        if end == width or shades[end] is not shades[start]:
            segments.append(Segment(text[start:end], paint.of(shades[start])))
            start = end
    return segments


def _shade(value: float) -> Tone:
    if not math.isfinite(value) or value < _LOW:
        return Tone.FAINT
    return Tone.DIM if value < _HIGH else Tone.ACCENT
