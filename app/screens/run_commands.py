"""The commands of a run screen: stop, schedule a stop, pause, checkpoint and kill.

A command that can't be carried out is refused with its reason. Stop and kill are confirmed first,
because their keys are easily pressed by mistake. A request is sent to the run's supervisor in a
worker thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Input, Static

from ltui.app.presentation.notifications import refusal, stop_progress, stopping_sentence
from ltui.app.screens.dialog import (
    TYPED_AT_ONCE,
    ConfirmScreen,
    Dialog,
    FullScreen,
    call_screen,
    do_after,
    show_error,
)
from ltui.training.problem import ProblemError
from ltui.training.state.good_checkpoints import last_good_checkpoint, nan_since
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.state.stop_conditions import (
    StopCondition,
    parse_condition,
    refusal_reason,
    unlogged_metrics,
)
from ltui.training.store.run_directory import RunDir
from ltui.widgets import formats
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line, clean_name


class RunCommandScreen(FullScreen[None]):
    """A screen with keys that send commands to one run."""

    def __init__(self, run_dir: RunDir, *, readonly: bool) -> None:
        super().__init__()
        self.run_dir, self.readonly = run_dir, readonly

    @property
    def snapshot(self) -> RunSnapshot | None:
        """The newest snapshot of the run; None before the first one."""
        raise NotImplementedError

    def refusal_of(self, action: str) -> str | None:
        """Return the reason why ``action`` can't be done now; None if it can."""
        action = "stop" if action == "stop_when" else action
        return refusal(self.snapshot, action, readonly=self.readonly)

    def is_refused(self, action: str) -> bool:
        """Return True if ``action`` can't be done now, and show the reason."""
        reason = self.refusal_of(action)
        if reason is not None:
            self.notify(reason, severity="warning", markup=False)
        return reason is not None

    def action_stop(self) -> None:
        if not self.is_refused("stop") and self.snapshot is not None:
            waits = self.snapshot.state is RunState.QUEUED and self.snapshot.supervisor_pid is None
            yes, no = ("take it out", "leave it") if waits else ("stop it", "keep it running")
            self._stop_after(ConfirmScreen(stop_question(self.snapshot), yes=yes, no=no))

    def ask_interrupt(self) -> bool:
        """Ask what Ctrl-C means. Return False if there is nothing to ask: no run that is live."""
        live = self.snapshot is None or self.snapshot.state in LIVE
        if self.readonly or not live:
            return False
        self._stop_after(interrupt_question(clean_name(self.run_dir.id), self.snapshot))
        return True

    def _stop_after(self, question: ConfirmScreen) -> None:
        self._send_after(question, {"cmd": "stop"}, stop_progress(self.snapshot))

    def action_stop_when(self) -> None:
        if self.is_refused("stop") or self.snapshot is None:
            return
        snapshot = self.snapshot

        def answered(conditions: tuple[StopCondition, ...] | None) -> None:
            if conditions is None:
                return
            documents = [condition.to_document() for condition in conditions]
            what = {"conditions": documents} if documents else {"cancel": True}
            self._send_request({"cmd": "stop_when", **what}, unlogged_metrics(conditions, snapshot))

        self.app.push_screen(StopWhenScreen(snapshot), answered)

    def action_pause(self) -> None:
        if not self.is_refused("pause") and self.snapshot is not None:
            paused = self.snapshot.state in (RunState.PAUSED, RunState.PAUSING)
            self._send_request({"cmd": "continue" if paused else "pause"}, None)

    def action_checkpoint(self) -> None:
        if not self.is_refused("checkpoint"):
            confirmation = "saving a checkpoint after the current step"
            self._send_request({"cmd": "checkpoint"}, confirmation)

    def action_kill(self) -> None:
        if not self.is_refused("kill") and self.snapshot is not None:
            text = kill_question(self.snapshot)
            question = ConfirmScreen(text, yes="kill it", no="keep it running")
            self._send_after(question, {"cmd": "kill"}, "killing every process of the run")

    def _send_after(
        self, question: ConfirmScreen, request: dict[str, Any], confirmation: str
    ) -> None:
        """Ask ``question``, and send a request if the answer is yes."""
        do_after(self, question, lambda: self._send_request(request, confirmation))

    @work(thread=True, exclusive=True, group="command")
    def _send_request(self, request: dict[str, Any], confirmation: str | None) -> None:
        """Send a request to the supervisor; show ``confirmation``, or why it failed."""
        # Imported here: what starts supervisors is not needed for the first frame.
        from ltui.app.live.run_requests import send_request

        try:
            send_request(self.run_dir, request)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            show_error(self, "The request failed", error)
        else:
            if confirmation is not None:
                notice = clean_line(confirmation)
                call_screen(self, partial(self.notify, notice, timeout=3, markup=False))


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
        keys = "⏎ apply   f1 help   esc cancel"
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
            if reason is not None:
                self._explain(f"stop when {text}: {reason}")
            elif self.is_typed_at_once:
                self._explain(TYPED_AT_ONCE)
            else:
                self.dismiss((condition,))


class InterruptScreen(ConfirmScreen):
    """The question of Ctrl-C: stop the run, close ltui, or stay. Return True for a stop."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "interrupt_question",
        """
        q | leave | close | Close ltui; training continues
        """,
    )
    ANSWERS = ConfirmScreen.ANSWERS | {"leave"}

    def __init__(self, question: str, *, can_stop: bool) -> None:
        super().__init__(question, yes="stop it", no="stay")
        self.answers[1:1] = [("q", "close, training continues", "leave")]
        self.answers[-1] = ("Esc", "stay", "answer(False)")
        self._can_stop = can_stop
        if not can_stop:
            del self.answers[0]

    def action_answer(self, yes: bool) -> None:
        if not yes or self._can_stop:
            super().action_answer(yes)

    async def action_leave(self) -> None:
        await self.app.run_action("leave")


def stop_question(snapshot: RunSnapshot) -> str:
    """Explain what a stop does, and how to resume the run."""
    name = clean_name(snapshot.name)
    if snapshot.state is RunState.QUEUED and snapshot.supervisor_pid is None:
        return f"Take {name} out of the queue? No process of it runs yet."
    if snapshot.saves_checkpoints is None:
        return (
            f"Stop {name}?\n"
            "It has not begun to train, so ltui does not know if it can save a checkpoint.\n"
            f"Now it would end by {snapshot.stop_signal}, without one."
        )
    if not snapshot.saves_checkpoints:
        return (
            f"Stop {name}?\n"
            f"It ends by {snapshot.stop_signal}, without a checkpoint: the program has not told\n"
            "ltui how to save one. Only what it saves itself is kept."
        )
    return (
        f"Stop {name}?\n"
        "It saves a checkpoint after the current step, then it ends.\n"
        "To continue it later, press r."
    )


def interrupt_question(name: str, snapshot: RunSnapshot | None) -> InterruptScreen:
    """Return the question of Ctrl-C about a live run, or about one that is not known yet."""
    if snapshot is None:
        return InterruptScreen(f"Stop {name}?", can_stop=True)
    if snapshot.state is RunState.STOPPING:
        return InterruptScreen(f"{stopping_sentence(snapshot)}.", can_stop=False)
    return InterruptScreen(stop_question(snapshot), can_stop=True)


def question_for_several(runs: str, snapshots: Sequence[RunSnapshot]) -> str:
    """Explain what a stop of several runs does. ``runs``: what they are called."""
    ends = "Each saves a checkpoint after its current step, then it ends."
    unsaved = sum(not snapshot.saves_checkpoints for snapshot in snapshots)
    if unsaved == len(snapshots):
        ends = "Each ends by a signal. ltui cannot save checkpoints of these programs."
    elif unsaved:
        ends += f"\nltui cannot do that for {unsaved} of them: these end by a signal."
    return f"Stop {runs}?\n{ends}"


def kill_question(snapshot: RunSnapshot) -> str:
    """Explain what is lost if the run is killed."""
    name = clean_name(snapshot.name)
    saved = last_good_checkpoint(snapshot.checkpoints, nan_since(snapshot.verdicts))
    if saved is None:
        lost = "It has no good checkpoint. All its progress will be lost."
    else:
        done = max(0, (snapshot.global_step or saved.global_step) - saved.global_step)
        steps = "step" if done == 1 else "steps"
        lost = (
            f"Its last good checkpoint is from step {formats.step(saved.global_step)}: "
            f"{formats.count(done)} {steps} will be lost."
        )
    gentle = "by a signal" if not snapshot.saves_checkpoints else "with a checkpoint"
    instead = f"To stop it {gentle} instead, press Esc, then s."
    return f"Kill {name}? All its processes end at once.\n{lost}\n{instead}"
