"""The base of the widgets that show a canvas."""

from __future__ import annotations

from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.palette import line_styles
from ltui.widgets.tone import Tone


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
