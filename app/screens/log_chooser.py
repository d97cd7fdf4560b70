"""The list of all logs of a run on several machines, to choose the one that the log panel shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.screens.dialog import Dialog
from ltui.widgets.changing_list import ChangingList
from ltui.widgets.make_bindings import bindings


class LogChooser(Dialog[int | None]):
    """Return the source of the chosen log, or None after Esc."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "logs",
        """
        escape | dismiss | cancel      | Change nothing
        down   | to_list | to the list | Go to the list
        """,
    )

    def __init__(self, sources: Sequence[tuple[int, str]], current: int) -> None:
        """``sources``: source and name of each log."""
        super().__init__()
        self._sources, self._current = tuple(sources), current
        self._listed: tuple[tuple[int, str], ...] = ()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(placeholder="filter: gpu-b, gpu-b:12, launcher", compact=True)
            yield ChangingList(id="log-list", markup=False)
            yield Static("type to filter   ↑↓ select   ⏎ show   f1 help   esc cancel", id="answers")

    def on_mount(self) -> None:
        self.query_one(".dialog").border_title = "log"
        self._fill("")
        self.query_one(Input).focus()

    def _fill(self, pattern: str) -> None:
        words = pattern.lower().split()
        self._listed = tuple(
            (source, name)
            for source, name in self._sources
            if all(word in name.lower() for word in words)
        )
        shown = self.query_one(OptionList)
        shown.clear_options()
        shown.add_options(Option(name) for _, name in self._listed)
        if self._listed:
            sources = [source for source, _ in self._listed]
            current = self._current
            shown.highlighted = sources.index(current) if current in sources else 0

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        event.stop()
        self._fill(event.value)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        index = self.query_one(OptionList).highlighted
        if index is not None:
            self.dismiss(self._listed[index][0])

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._listed[event.option_index][0])

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()
