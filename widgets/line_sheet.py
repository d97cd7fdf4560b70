"""Lines of cells that are laid out anew for every width; scrolled by whatever holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from ltui.widgets.columns import Cells
from ltui.widgets.palette import line_styles

Draw = Callable[[int], Sequence[Cells]]


class LineSheet(Widget):
    """As high as its lines. ``show`` takes a function from a width to lines."""

    DEFAULT_CSS = """
    LineSheet { height: auto; width: 1fr; }
    """

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._draw: Draw | None = None
        self._lines: dict[int, list[Cells]] = {}

    def show(self, draw: Draw) -> None:
        """Draw this from now on; nothing is repainted where it comes out the same."""
        before, width = self._lines.get(self.size.width), self.size.width
        self._draw, self._lines = draw, {}
        if width and before is not None and before == self._of(width):
            return
        self.refresh(layout=True)

    def _of(self, width: int) -> list[Cells]:
        if width not in self._lines:
            # One width is drawn, another may be measured: more are of the past.
            if len(self._lines) > 2:
                self._lines.clear()
            self._lines[width] = list(self._draw(width)) if self._draw and width else []
        return self._lines[width]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return max(1, len(self._of(width)))

    def render(self) -> Text:
        paint = line_styles(self.app)
        rows = []
        for cells in self._of(self.size.width):
            row = Text(no_wrap=True, overflow="crop", end="")
            for cell in cells:
                row.append(cell.text, paint.of(cell.tone))
            rows.append(row)
        return Text("\n", no_wrap=True, overflow="crop", end="").join(rows)
