"""Widgets for lines of cells that are laid out again for each width. A container scrolls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from ltui.widgets.columns import Cells
from ltui.widgets.palette import cells_strip, line_styles

LayOut = Callable[[int], Sequence[Cells]]
"""Return the lines for a width in cells."""


class LineSheet(Widget):
    """A widget that is as high as its lines. The text can be selected with the mouse."""

    DEFAULT_CSS = """
    LineSheet { height: auto; width: 1fr; }
    """

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._lay_out: LayOut | None = None
        self._lines: dict[int, list[Cells]] = {}

    def show(self, lay_out: LayOut) -> None:
        """Show the lines that ``lay_out`` returns; repaint only if they changed."""
        before = self._lines.get(self.size.width)
        self._lay_out, self._lines = lay_out, {}
        now = self.lines_for(self.size.width)
        if before is None or len(before) != len(now):
            # Only another number of lines changes the layout.
            self.refresh(layout=True)
        elif not now or now != before:
            self.repaint_changes(before, now)

    def repaint_changes(self, before: Sequence[Cells], now: Sequence[Cells]) -> None:  # noqa: ARG002
        """Repaint after a change of the text but not of the number of lines."""
        self.refresh()

    def lines_for(self, width: int) -> list[Cells]:
        """Return the lines for a width in cells."""
        if width not in self._lines:
            # Textual may measure another width than it draws. Older widths are not needed.
            if len(self._lines) > 2:
                self._lines.clear()
            self._lines[width] = list(self._lay_out(width)) if self._lay_out and width else []
        return self._lines[width]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return max(1, len(self.lines_for(width)))

    def render(self) -> Text:
        styles = line_styles(self.app)
        rows = []
        for cells in self.lines_for(self.size.width):
            row = Text(no_wrap=True, overflow="crop", end="")
            for cell in cells:
                row.append(cell.text, styles.of(cell.tone))
            rows.append(row)
        return Text("\n", no_wrap=True, overflow="crop", end="").join(rows)


class LiveLines(LineSheet):
    """Lines that change with every frame: cheaper to draw, because they can't be selected.

    If only some lines changed, only these are repainted.
    """

    def repaint_changes(self, before: Sequence[Cells], now: Sequence[Cells]) -> None:
        width = self.size.width
        for y, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new:
                self.refresh(Region(0, y, width, 1))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        lines = self.lines_for(width)
        return cells_strip(lines[y] if y < len(lines) else (), width, self)
