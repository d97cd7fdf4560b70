"""One line with a tab for each panel, if not all panels are visible."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget


class TabBar(Widget):
    """A line such as ``1 loss  2 throughput [3 ranks]``. A click shows the panel."""

    DEFAULT_CSS = """
    TabBar { height: 1; link-style: none; link-style-hover: bold; }
    """
    can_focus = False

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._tabs: tuple[tuple[int, str, str], ...] = ()
        self._chosen = ""

    def show(self, tabs: Sequence[tuple[int, str, str]], chosen: str) -> None:
        """Show ``tabs`` (number, panel name, title), and mark the chosen panel."""
        if (tuple(tabs), chosen) != (self._tabs, self._chosen):
            self._tabs, self._chosen = tuple(tabs), chosen
            self.refresh()

    def render(self) -> RenderResult:
        line = Text(" ", no_wrap=True, end="")
        labels = [f"{number} {title}" for number, _, title in self._tabs]
        # Three blanks between two labels if they fit, otherwise one.
        pad = " " if sum(len(label) + 3 for label in labels) <= self.size.width else ""
        for (_, panel, _), label in zip(self._tabs, labels, strict=True):
            start = len(line)
            # Reverse video is visible without colour as well.
            style = Style(reverse=True, bold=True) if panel == self._chosen else Style()
            line.append(f"{pad}{label}{pad}", style)
            line.apply_meta({"@click": f"screen.panel('{panel}')"}, start, len(line))
            line.append(" ")
        return line
