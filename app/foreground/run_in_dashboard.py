"""The dashboard of a run in the foreground: ``ltui run``, ``exec`` and ``resume`` on a terminal.

Signals act as without the dashboard. The first Ctrl-C stops the run and the second kills it.
SIGTERM and SIGHUP end this process alone. The command ends when the run ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual import events, work
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ltui.app.foreground.interrupt_signals import ReceivedSignals
from ltui.app.live.run_requests import send_request
from ltui.app.open_dashboard import open_app
from ltui.app.presentation.stop_effect import stop_effect, stop_progress
from ltui.app.textual_app import LtuiApp
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.run_directory import RunDir, ltui_home

POLL_S = 0.2
"""Seconds between two checks for signals and for the end of the run."""
CLOSE_AFTER_S = 10.0
"""Seconds that the dashboard stays open after the run has ended, unless a key is pressed."""


class ForegroundApp(LtuiApp):
    """The dashboard of one run, which closes when the run ends."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "ctrl+c",
            "interrupt",
            "stop",
            id="interrupt",
            show=False,
            priority=True,
            tooltip="Stop the run; press it again to kill it",
        ),
    ]

    def __init__(
        self,
        run_dir: RunDir,
        signals: ReceivedSignals,
        *,
        request: Callable[[RunDir, dict[str, Any]], Any] = send_request,
        close_after_s: float = CLOSE_AFTER_S,
    ) -> None:
        super().__init__(ltui_home(), run=run_dir)
        self._run_dir, self._signals, self._request = run_dir, signals, request
        self._close_after_s = close_after_s
        self._input_at = -math.inf
        self._closes_at: float | None = None
        self._run_screen: Screen[None] | None = None

    def get_default_screen(self) -> Screen[None]:
        self._run_screen = super().get_default_screen()
        return self._run_screen

    def on_mount(self) -> None:
        self.set_interval(POLL_S, self._poll)
        effect = stop_effect(resolve_snapshot(self._run_dir))
        self.notify(f"Ctrl-C {effect}; q closes this screen, training continues.", timeout=8)

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, (events.Key, events.MouseDown)):
            self._input_at = time.monotonic()
        await super().on_event(event)

    def exit(self, *args: Any, **options: Any) -> None:
        """End without the farewell message, because the command prints the state of the run."""
        options.pop("message", None)
        super().exit(*args, **options)

    def action_interrupt(self) -> None:
        self._signals.interrupts += 1
        self._poll()

    def _poll(self) -> None:
        if self._signals.leave is not None:
            self.exit()
            return
        request = self._signals.next_request()
        if request is not None:
            self._send(request)
        self._close_after_the_end()

    @work(thread=True, exit_on_error=False)
    def _send(self, request: dict[str, Any]) -> None:
        killing = request["cmd"] == "kill"
        stopping = f"{stop_progress(self._snapshot())}; Ctrl-C again kills"
        message = "killing the run" if killing else stopping
        try:
            self._request(self._run_dir, request)
        except ProblemError as error:
            message = str(error)
        self.call_from_thread(self.notify, message, markup=False)

    def _snapshot(self) -> RunSnapshot | None:
        snapshot: RunSnapshot | None = getattr(self._run_screen, "snapshot", None)
        return snapshot

    def _close_after_the_end(self) -> None:
        snapshot = self._snapshot()
        now = time.monotonic()
        if snapshot is None or snapshot.state in LIVE:
            self._closes_at = None
        elif self._closes_at is None:
            self._closes_at = now + self._close_after_s
            self.notify(
                f"The run has ended. This screen closes in {self._close_after_s:.0f} s; "
                "press any key to keep it open.",
                timeout=self._close_after_s,
            )
        elif self._input_at >= self._closes_at - self._close_after_s:
            self._keep_open()
        elif now >= self._closes_at:
            self.exit()

    def _keep_open(self) -> None:
        if self._closes_at != math.inf:
            self._closes_at = math.inf
            self.notify("This screen stays open. Press q to close it.", timeout=4)


def show_dashboard(run_dir: RunDir, signals: ReceivedSignals) -> bool:
    """Show the dashboard until it is left or the run has ended. Return False if it failed."""
    return open_app(lambda: ForegroundApp(run_dir, signals)) == 0
