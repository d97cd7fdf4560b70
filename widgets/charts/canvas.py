"""A grid of characters and inks (indices into a list of styles) that becomes terminal lines.

The base of the widgets that show a canvas is here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ltui.widgets.charts.braille import BLANK
from ltui.widgets.palette import line_styles
from ltui.widgets.tone import Tone

_SPACE = ord(" ")


class Canvas:
    """A grid of cells: ``chars`` holds code points (0 after a wide one), ``ink`` style indices."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.chars: npt.NDArray[np.uint32] = np.full((height, width), _SPACE, dtype=np.uint32)
        self.ink: npt.NDArray[np.int16] = np.zeros((height, width), dtype=np.int16)

    def write(self, x: int, y: int, text: str, ink: int = 0) -> int:
        """Write ``text`` at ``x``, ``y``, cut at the edges; return the column after it."""
        if not 0 <= y < self.height:
            return x + cell_len(text)
        width = cell_len(text)
        if width == len(text) and x >= 0 and x + width <= self.width:
            self.chars[y, x : x + width] = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
            self.ink[y, x : x + width] = ink
            return x + width
        for letter in text:
            width = cell_len(letter)
            if width and x >= 0 and x + width <= self.width:
                self.chars[y, x : x + width] = (ord(letter), 0)[:width]
                self.ink[y, x : x + width] = ink
            x += width
        return x

    def blit(self, x: int, y: int, codes: npt.NDArray[np.uint32], ink: int) -> None:
        """Copy a block of braille code points onto the canvas, except those without a dot."""
        height, width = codes.shape
        drawn = codes != BLANK
        self.chars[y : y + height, x : x + width][drawn] = codes[drawn]
        self.ink[y : y + height, x : x + width][drawn] = ink

    def line(self, y: int) -> str:
        """Return line ``y`` as plain text."""
        return self._letters(y).replace("\0", "")

    def _letters(self, y: int) -> str:
        return str(self.chars[y].astype("<u4").tobytes(), "utf-32-le")

    def text(self) -> str:
        """Return all lines as plain text."""
        return "\n".join(self.line(y) for y in range(self.height))

    def strip(self, y: int, styles: Sequence[Style]) -> Strip:
        """Return line ``y`` as segments, one for each run of cells with the same ink."""
        inks = self.ink[y]
        breaks = [0, *(np.flatnonzero(np.diff(inks)) + 1).tolist(), self.width]
        letters = self._letters(y)
        segments = [
            Segment(letters[a:b].replace("\0", ""), styles[inks[a]]) for a, b in pairwise(breaks)
        ]
        return Strip(segments, self.width)


def changed_spans(old: Canvas, new: Canvas) -> list[tuple[int, int, int]]:
    """Return (line, first column, end column) of what differs between canvases of one size."""
    differs = (old.chars != new.chars) | (old.ink != new.ink)
    lines = np.flatnonzero(differs.any(axis=1))
    first = differs.argmax(axis=1)
    last = new.width - differs[:, ::-1].argmax(axis=1)
    return [(int(y), int(first[y]), int(last[y])) for y in lines]


class CanvasWidget(Widget):
    """A widget whose lines are those of a ``Canvas``. Subclasses draw it."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._inks: list[Style] = []

    def _current_canvas(self) -> Canvas:
        """Return the drawing of the present data and size; it is drawn once for all lines."""
        raise NotImplementedError

    def render_lines(self, crop: Region) -> list[Strip]:
        # Get the styles once for each repaint: per line they would cost as much as the curves.
        self._inks = self._ink_styles()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        canvas = self._current_canvas()
        if y >= canvas.height:
            return Strip.blank(self.size.width, self.rich_style)
        return canvas.strip(y, self._inks or self._ink_styles())

    def _ink_styles(self) -> list[Style]:
        """Return the styles in the order of the canvas's inks."""
        base, styles = self.rich_style, line_styles(self.app)
        fixed = [styles.of(tone) for tone in (Tone.PLAIN, Tone.DIM, Tone.FAINT, Tone.DIM)]
        return [base + style for style in (*fixed, *styles.series, *styles.faint_series)]
