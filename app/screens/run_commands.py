"""The commands of a run screen: stop, schedule a stop, pause, checkpoint and kill.

A command that can't be carried out is refused with its reason. Stop and kill are confirmed first.
A request is sent to the run's supervisor in a worker thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from textual import work

from ltui.app.panels.worker_results import call_screen, show_error
from ltui.app.presentation.notifications import refusal, stop_progress
from ltui.app.screens.dialog import ConfirmScreen, FullScreen
from ltui.app.screens.stop_question import interrupt_question, kill_question, stop_question
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_line, clean_name

if TYPE_CHECKING:
    from ltui.training.state.stop_conditions import StopCondition


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
            question = ConfirmScreen(
                stop_question(self.snapshot), yes="stop it", no="keep it running"
            )
            self._stop_after(question)

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
        # Imported here: conditions are not needed for the first frame.
        from ltui.app.screens.stop_question import StopWhenScreen
        from ltui.training.state.stop_conditions import unlogged_metrics

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

        def answered(yes: bool | None) -> None:
            if yes:
                self._send_request(request, confirmation)

        self.app.push_screen(question, answered)

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
