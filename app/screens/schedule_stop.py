"""The dialog to schedule a stop: at a step, at the end of an epoch, at a metric value or a time."""

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

from ltui.training.problem import ProblemError
from ltui.training.state.stop_conditions import parse_condition
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line

ABOUT = """\
500            at that step
epoch          at the end of the current epoch
val/loss<0.2   when a metric passes a value (< <= > >=)
18:30, +2h     at that time, or after that long"""


class StopWhenScreen(ModalScreen[dict[str, Any]]):
    """Return the request for the supervisor, or None."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "stop_when",
        """
        escape | dismiss | cancel | Change nothing
        """,
    )

    def __init__(self, scheduled: Sequence[str]) -> None:
        """``scheduled`` are the descriptions of scheduled stops, such as ``at step 500``."""
        super().__init__()
        self._scheduled = tuple(clean_line(description) for description in scheduled)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            if self._scheduled:
                yield Static(f"Scheduled: {', or '.join(self._scheduled)}.", markup=False)
            yield Static("Stop automatically, with a checkpoint:", markup=False)
            yield Static(Text(ABOUT, "dim"), classes="about")
            yield Input(placeholder="when", id="when", compact=True)
            yield Static(Text(""), id="answers")

    def on_mount(self) -> None:
        self.query_one(".dialog").border_title = "schedule a stop"
        self._explain("")
        self.query_one(Input).focus()

    def _explain(self, problem: str) -> None:
        keys = "⏎ apply   esc cancel"
        keys += "   - and ⏎ remove the schedule" if self._scheduled else ""
        text = Text(f"{problem}\n", "bold red") if problem else Text()
        self.query_one("#answers", Static).update(text.append(keys, "not bold default"))

    @on(Input.Submitted)
    def _apply(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value.strip()
        if not text:
            self.dismiss(None)
        elif text == "-" and self._scheduled:
            self.dismiss({"cmd": "stop_when", "cancel": True})
        else:
            try:
                condition = parse_condition(text, time.time())
            except ProblemError as error:
                self._explain(str(error.problems[0]))
            else:
                self.dismiss({"cmd": "stop_when", "conditions": [condition.to_document()]})
