"""A widget for lines of cells that are laid out again for each width. Its container scrolls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from ltui.widgets.columns import Cells
from ltui.widgets.palette import line_styles

LayOut = Callable[[int], Sequence[Cells]]
"""Return the lines for a width in cells."""


class LineSheet(Widget):
    """A widget that is as high as its lines."""

    DEFAULT_CSS = """
    LineSheet { height: auto; width: 1fr; }
    """

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._lay_out: LayOut | None = None
        self._lines: dict[int, list[Cells]] = {}

    def show(self, lay_out: LayOut) -> None:
        """Show the lines that ``lay_out`` returns; repaint only if they changed."""
        before, width = self._lines.get(self.size.width), self.size.width
        self._lay_out, self._lines = lay_out, {}
        if width and before is not None and before == self._lines_for(width):
            return
        self.refresh(layout=True)

    def _lines_for(self, width: int) -> list[Cells]:
        if width not in self._lines:
            # Textual may measure another width than it draws. Older widths are not needed.
            if len(self._lines) > 2:
                self._lines.clear()
            self._lines[width] = list(self._lay_out(width)) if self._lay_out and width else []
        return self._lines[width]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return max(1, len(self._lines_for(width)))

    def render(self) -> Text:
        styles = line_styles(self.app)
        rows = []
        for cells in self._lines_for(self.size.width):
            row = Text(no_wrap=True, overflow="crop", end="")
            for cell in cells:
                row.append(cell.text, styles.of(cell.tone))
            rows.append(row)
        return Text("\n", no_wrap=True, overflow="crop", end="").join(rows)
