"""Asks when a run is to stop by itself: a step, an epoch's end, a metric's value, a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ltui.app.screens.keys import bindings
from ltui.training.problem import ProblemError
from ltui.training.run.stopping import condition_of
from ltui.widgets.sanitise import clean_line

ABOUT = """\
500            exactly at that step
epoch          once the epoch that runs is over
val/loss<0.2   when a metric passes a value (< <= > >=)
18:30  +2h     at that time, or after that long"""


class StopWhenScreen(ModalScreen[dict[str, Any]]):
    """Gives the request for the supervisor, or None."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "stop_when",
        """
        escape | leave | leave | Change nothing
        """,
    )

    def __init__(self, stands: Sequence[str]) -> None:
        super().__init__()
        self._stands = tuple(clean_line(words) for words in stands)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            if self._stands:
                yield Static(f"It stops {', or '.join(self._stands)}.", markup=False)
            yield Static("Stop with a checkpoint, by itself:", markup=False)
            yield Static(Text(ABOUT, "dim"), classes="about")
            yield Input(placeholder="when", id="when", compact=True)
            yield Static(Text(""), id="answers")

    def on_mount(self) -> None:
        self._say("")
        self.query_one(Input).focus()

    def _say(self, problem: str) -> None:
        keys = "enter takes it     escape leaves"
        keys += "     - forgets what stands" if self._stands else ""
        text = Text(f"{problem}\n", "bold red") if problem else Text()
        self.query_one("#answers", Static).update(text.append(keys, "not bold default"))

    @on(Input.Submitted)
    def _take(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value.strip()
        if not text:
            self.dismiss(None)
        elif text == "-" and self._stands:
            self.dismiss({"cmd": "stop_when", "cancel": True})
        else:
            try:
                condition = condition_of(text, time.time())
            except ProblemError as error:
                self._say(str(error.problems[0]))
            else:
                self.dismiss({"cmd": "stop_when", "conditions": [condition.to_document()]})

    def action_leave(self) -> None:
        self.dismiss(None)
