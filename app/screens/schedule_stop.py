"""The dialog to schedule a stop: at a step, at the end of an epoch, at a metric value or a time."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Input, Static

from ltui.app.screens.dialog import Dialog
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.state.stop_conditions import StopCondition, parse_condition, refusal_reason
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line

ABOUT = """\
500            at that step
epoch          at the end of the current epoch
val/loss<0.2   when a metric passes a value (< <= > >=)
18:30, +2h     at that time, or after that long"""


class StopWhenScreen(Dialog[tuple[StopCondition, ...]]):
    """Return a condition that the run can meet, an empty tuple to remove the schedule, or None."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "stop_when",
        """
        escape | dismiss | cancel | Change nothing
        """,
    )

    def __init__(self, snapshot: RunSnapshot) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._scheduled = tuple(clean_line(description) for description in snapshot.stops)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            if self._scheduled:
                yield Static(f"Scheduled: {', or '.join(self._scheduled)}.", markup=False)
            saved = ", with a checkpoint" if self._snapshot.saves_checkpoints else ""
            yield Static(f"Stop automatically{saved}:", markup=False)
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
            self.dismiss(())
        else:
            try:
                condition = parse_condition(text, time.time())
            except ProblemError as error:
                self._explain(str(error.problems[0]))
                return
            reason = refusal_reason(condition, self._snapshot)
            if reason is None:
                self.dismiss((condition,))
            else:
                self._explain(f"stop when {text}: {reason}")
