"""Dialogs: a question before something is destroyed, and the problems of a failed action."""

from __future__ import annotations

import math
from typing import ClassVar, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Static

from ltui.app.keys.key_queue import OrderedKeysApp
from ltui.app.screens.dialog import Dialog
from ltui.widgets.make_bindings import bindings

DEAF_S = 0.5
"""Seconds after a question was painted in which no answer but a refusal is accepted."""


class ConfirmScreen(Dialog[bool]):
    """Return True for ``y`` only, and False for ``n`` or Escape; Enter answers nothing.

    A key or a click soon after the question appeared was meant for the screen below, so it is
    ignored, and the question stays. ``n`` and Escape change nothing and work at once.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "confirm",
        """
        y          | answer(True)  | yes | Do it
        n,escape,q | answer(False) | no  | Cancel
        """,
    )

    def __init__(self, question: str, *, yes: str, no: str = "cancel") -> None:
        super().__init__()
        self.question = question
        self._opened_at = math.inf
        """Time of the app's clock at which the question was first painted."""
        self.answers = [("y", yes, "answer(True)"), ("n or Esc", no, "answer(False)")]
        """Keys with their meaning, and what a click on them does."""

    def compose(self) -> ComposeResult:
        keys = Text()
        for key, meaning, action in self.answers:
            start = len(keys)
            keys.append(key, "bold")
            keys.append(f" {meaning}")
            keys.apply_meta({"@click": f"screen.{action}"}, start, len(keys))
            keys.append("     ")
        with Vertical(classes="dialog"):
            yield Static(Text(self.question), id="question")
            yield Static(keys, id="answers")

    def on_mount(self) -> None:
        self.call_after_refresh(self._painted)

    def _painted(self) -> None:
        self._opened_at = cast(OrderedKeysApp, self.app).clock()

    def action_answer(self, yes: bool) -> None:
        if not yes or not self.is_deaf:
            self.dismiss(yes)

    @property
    def is_deaf(self) -> bool:
        """Whether the key or click that is handled now came too soon to be an answer."""
        return cast(OrderedKeysApp, self.app).input_at - self._opened_at < DEAF_S


class ProblemScreen(Dialog[None]):
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
