"""Heat strips: the utilisation of many GPUs over the last minutes, in as many columns as fit."""

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
"""Minimum cells for one GPU: sign, number, a readable strip and a percentage."""
NARROW_WIDTH = 12
"""Minimum cells for one GPU if there are more GPUs than lines at ``LEAST_WIDTH``."""
GAP = 2
"""Cells between two columns of GPUs."""
_PERCENT_CELLS = 5
_LOW, _HIGH = 0.34, 0.67
"""Limits between faint, dim and bright blocks, as fractions of full utilisation."""


class GpuHeat(Widget):
    """A legend, and a strip for each GPU. Tall, bright blocks mean high utilisation."""

    DEFAULT_CSS = """
    GpuHeat { height: auto; width: 1fr; }
    """
    can_focus = False

    rows: reactive[tuple[GpuRow, ...]] = reactive((), repaint=False)
    most_lines: reactive[int] = reactive(8, repaint=False)
    """Maximum lines of strips, without the legend. More GPUs are placed side by side."""
    block_s: reactive[float] = reactive(0.0, repaint=False)
    """Seconds that one block represents."""

    def show(self, rows: Sequence[GpuRow], most_lines: int, block_s: float) -> None:
        """Draw ``rows`` in at most ``most_lines`` lines below the legend, if they fit."""
        rows = tuple(rows)
        self.block_s = block_s
        layout = len(rows) != len(self.rows) or most_lines != self.most_lines
        if layout or rows != self.rows:
            self.most_lines = most_lines
            self.rows = rows
            self.refresh(layout=layout)

    def grid(self, width: int) -> tuple[int, int]:
        """Return the number of columns and lines of strips in ``width`` cells."""
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
        """Return the number of lines, including the legend."""
        return self.grid(width)[1] + 1 if self.rows else 0

    def render_lines(self, crop: Region) -> list[Strip]:
        self._styles = line_styles(self.app)
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base, styles = self.rich_style, self._styles
        columns, lines = self.grid(width)
        if y > lines or not lines:
            return Strip.blank(width, base)
        column_width = (width - GAP * (columns - 1)) // columns
        if y == 0:
            text = self._legend(column_width)
            return Strip([Segment(text, base + styles.title)]).adjust_cell_length(width, base)
        y -= 1
        segments: list[Segment] = []
        for column in range(columns):
            index = column * lines + y
            if index >= len(self.rows):
                break
            if column:
                segments.append(Segment(" " * GAP, base))
            segments += _gpu_segments(self.rows[index], column_width, self._label_width(), styles)
        drawn = [Segment(s.text, base + s.style if s.style else base) for s in segments]
        return Strip(drawn).adjust_cell_length(width, base)

    def _legend(self, column_width: int) -> str:
        """Return the explanation of the blocks, with the time that a strip covers."""
        cells = max(1, column_width - self._label_width() - 3 - _PERCENT_CELLS)
        points = max((len(row.heat) for row in self.rows), default=0)
        covered = min(cells, points) * self.block_s
        span = f"utilisation, last {duration(round(covered))}" if covered else "utilisation"
        return f"  {span}   ▁ 0 %  ▇ 100 %"

    def _label_width(self) -> int:
        return max((len(row.index) for row in self.rows), default=1)


def _gpu_segments(row: GpuRow, width: int, label: int, styles: LineStyles) -> list[Segment]:
    sign = SIGNS.get(row.tone, " ")
    column_width = max(1, width - label - 3 - _PERCENT_CELLS)
    return [
        Segment(f"{sign} ", styles.of(row.tone)),
        Segment(f"{row.index:>{label}} ", styles.of(Tone.PLAIN)),
        *_shades(row.heat, column_width, styles),
        Segment(row.utilisation_text.rjust(_PERCENT_CELLS), styles.of(Tone.PLAIN)),
    ]


def _shades(values: Sequence[float], width: int, styles: LineStyles) -> list[Segment]:
    """Return the strip, with low values nearer to the background."""
    shown = list(values)[-width:]
    text = strip(shown, width, high=1.0)
    shades = [Tone.FAINT] * (width - len(shown)) + [_shade(v) for v in shown]
    segments: list[Segment] = []
    start = 0
    for end in range(1, width + 1):
        if end == width or shades[end] is not shades[start]:
            segments.append(Segment(text[start:end], styles.of(shades[start])))
            start = end
    return segments


def _shade(value: float) -> Tone:
    if not math.isfinite(value) or value < _LOW:
        return Tone.FAINT
    return Tone.DIM if value < _HIGH else Tone.ACCENT
