"""One line that names the panels which can be switched to, the chosen one marked."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget


class TabBar(Widget):
    """``1 loss  2 throughput [3 ranks]``; a click switches."""

    DEFAULT_CSS = """
    TabBar { height: 1; link-style: none; link-style-hover: bold; }
    """
    can_focus = False

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._tabs: tuple[tuple[int, str, str], ...] = ()
        self._chosen = ""

    def show(self, tabs: Sequence[tuple[int, str, str]], chosen: str) -> None:
        """``tabs`` are (number, panel, title)."""
        if (tuple(tabs), chosen) != (self._tabs, self._chosen):
            self._tabs, self._chosen = tuple(tabs), chosen
            self.refresh()

    def render(self) -> RenderResult:
        line = Text(" ", no_wrap=True, end="")
        words = [f"{number} {title}" for number, _, title in self._tabs]
        # Three blanks between two titles where there is room, otherwise one.
        pad = " " if sum(len(w) + 3 for w in words) <= self.size.width else ""
        for (_, panel, _), word in zip(self._tabs, words, strict=True):
            start = len(line)
            # Reverse video is seen without colour as well.
            style = Style(reverse=True, bold=True) if panel == self._chosen else Style()
            line.append(f"{pad}{word}{pad}", style)
            line.apply_meta({"@click": f"screen.panel('{panel}')"}, start, len(line))
            line.append(" ")
        return line
