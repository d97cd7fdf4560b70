"""Dialogs: a question before something is destroyed, and the problems of a failed action."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from ltui.widgets.make_bindings import bindings


class ConfirmScreen(ModalScreen[bool]):
    """Return True for ``y`` only, and False for ``n`` or Escape; Enter answers nothing."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "confirm",
        """
        y          | dismiss(True)  | yes | Do it
        n,escape,q | dismiss(False) | no  | Cancel
        """,
    )

    def __init__(self, question: str, *, yes: str, no: str = "cancel") -> None:
        super().__init__()
        self._question, self._yes, self._no = question, yes, no

    def compose(self) -> ComposeResult:
        keys = Text()
        for key, meaning, value in (("y", self._yes, True), ("n or Esc", self._no, False)):
            start = len(keys)
            keys.append(key, "bold")
            keys.append(f" {meaning}")
            keys.apply_meta({"@click": f"screen.dismiss({value})"}, start, len(keys))
            keys.append("     ")
        with Vertical(classes="dialog"):
            yield Static(Text(self._question), id="question")
            yield Static(keys, id="answers")


class ProblemScreen(ModalScreen[None]):
    """A list of problems, each with its remedy, after an action has failed."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "problem",
        """
        escape,enter,q,space | dismiss | close | Back
        """,
    )

    def __init__(self, title: str, lines: list[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -bad"):
            yield Static(Text(self._title, "bold"), id="question")
            for line in self._lines:
                yield Static(Text(f"✗ {line}"), classes="problem")
            yield Static(Text("Enter or Esc: close"), id="answers")
