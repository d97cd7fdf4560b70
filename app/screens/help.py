"""Every key of the screen below, in groups: taken from the bindings, so that none is left out."""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from ltui.app.screens.keys import bindings
from ltui.app.screens.listed_keys import EVERYWHERE, SCREEN, groups_of, listed_keys, refusal_of

TWO_COLUMNS_FROM = 130
"""Cells of width from which the groups stand in two columns."""
LONGEST_KEYS = 12
"""Cells for the keys; longer ones stand in a line of their own."""

Group = tuple[str, list[tuple[str, str, bool]]]
"""Heading, and for each line the keys, what they do, and whether they can be used now."""


class HelpScreen(ModalScreen[None]):
    """A list of keys over the screen it explains."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "help",
        """
        escape,q,question_mark,enter | close | close | Close the help
        """,
    )

    def __init__(self, groups: list[Group], about: str) -> None:
        super().__init__()
        self._groups, self._about = groups, about

    @classmethod
    def of(cls, screen: Screen[object]) -> HelpScreen:
        """Return the help for ``screen``."""
        groups: list[Group] = []
        for heading, keys in groups_of(listed_keys(screen)):
            lines = [(k.keys, k.about, refusal_of(screen, k.binding.action) is None) for k in keys]
            if heading == SCREEN:
                lines += [(keys, words, True) for keys, words in EVERYWHERE]
            groups.append((heading, lines))
        return cls(groups, str(getattr(screen, "ABOUT", "")))

    def compose(self) -> ComposeResult:
        left, right = _halves(self._groups)
        with Vertical(classes="dialog -help"):
            if self._about:
                yield Static(Text(self._about), classes="about")
            with VerticalScroll(id="help-scroll"), Horizontal(id="help-columns"):
                yield Static(left, id="help-left")
                yield Static(right, id="help-right")
            yield Static(Text("esc close   ↑↓ scroll   Dim keys can't be used now."), id="answers")

    def on_mount(self) -> None:
        self.query_one("#help-scroll").focus()
        self._fit(self.app.size.width)

    def on_resize(self, event: events.Resize) -> None:
        self._fit(event.size.width)

    def _fit(self, width: int) -> None:
        self.set_class(width >= TWO_COLUMNS_FROM, "-two-columns")

    def action_close(self) -> None:
        self.dismiss(None)


def _halves(groups: list[Group]) -> tuple[Text, Text]:
    """Return the groups in two columns, of which the left one is not the shorter."""
    total = sum(len(lines) + 2 for _, lines in groups)
    left: list[Group] = []
    height = 0
    for group in groups:
        if height * 2 < total:
            left.append(group)
            height += len(group[1]) + 2
    return _column(left), _column(groups[len(left) :])


def _column(groups: list[Group]) -> Text:
    text = Text()
    for heading, lines in groups:
        text.append(f"{heading}\n", "bold underline")
        for keys, words, usable in lines:
            weight = "" if usable else "dim"
            text.append(" " * max(0, LONGEST_KEYS - cell_len(keys)))
            text.append(keys, f"bold {weight}".strip())
            text.append(f"\n{' ' * LONGEST_KEYS}" if cell_len(keys) > LONGEST_KEYS else "")
            text.append(f"  {words}\n", weight)
        text.append("\n")
    return text
