"""The list of themes, and the screen of the command palette."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.command import CommandList, CommandPalette
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.screens.choosers import ChangingList
from ltui.app.screens.dialog import ClosableScreen, Dialog
from ltui.widgets.make_bindings import bindings


class ThemeScreen(Dialog[str]):
    """Return the chosen theme, or None after Esc, which restores the previous theme."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "themes",
        """
        escape,q,t | cancel | cancel | Close the list and keep the theme of before
        """,
    )

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        self._previous_theme = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield ChangingList(*(Option(name, id=name) for name in self._names), markup=False)
            yield Static(Text("↑↓ preview   ⏎ use   esc cancel"), id="answers")

    def on_mount(self) -> None:
        self._previous_theme = self.app.theme
        self.query_one(".dialog").border_title = "theme"
        options = self.query_one(OptionList)
        if self._previous_theme in self._names:
            options.highlighted = self._names.index(self._previous_theme)
        options.focus()

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if event.option_id is not None and event.option_id != self.app.theme:
            self.app.theme = event.option_id

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option_id)

    def action_cancel(self) -> None:
        self.app.theme = self._previous_theme
        self.dismiss(None)


class Commands(CommandList, ChangingList, can_focus=False):
    """The commands that were found, which the next search replaces."""


class Palette(CommandPalette, ClosableScreen[None]):
    """The palette, also for keys that arrive faster than it closes."""

    def compose(self) -> ComposeResult:
        for widget in super().compose():
            yield Commands() if type(widget) is CommandList else widget
