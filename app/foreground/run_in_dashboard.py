"""The dashboard of a run in the foreground: ``ltui run``, ``exec`` and ``resume`` on a terminal.

Ctrl-C asks, as in every dashboard, and so does SIGINT. SIGTERM and SIGHUP end this process alone,
unless a launcher sends them. The command ends when the run ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from textual import events, work
from textual.screen import Screen

from ltui.app.interrupt_signals import ReceivedSignals
from ltui.app.live.run_requests import send_request
from ltui.app.open_dashboard import open_app
from ltui.app.textual_app import LtuiApp
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.run_directory import RunDir, ltui_home

POLL_S = 0.2
"""Seconds between two checks for signals and for the end of the run."""
CLOSE_AFTER_S = 10.0
"""Seconds that the dashboard stays open after the run has ended, unless a key is pressed."""


class ForegroundApp(LtuiApp):
    """The dashboard of one run, which closes when the run ends."""

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
        self.notify(
            "q closes this screen, and training continues. s stops the run; Ctrl-C asks which.",
            timeout=8,
        )

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, (events.Key, events.MouseDown)):
            self._input_at = time.monotonic()
        await super().on_event(event)

    def exit(self, *args: Any, **options: Any) -> None:
        """End without the farewell message of the run, whose state the command prints."""
        if self._run_screen in self.screen_stack:
            options.pop("message", None)
        super().exit(*args, **options)

    def _poll(self) -> None:
        if self._signals.leave is not None:
            self.exit()
            return
        if self._signals.stop_requested:
            request = self._signals.next_request()
            if request is not None:
                self._send(request)
        elif self._signals.interrupts:
            # The next one, perhaps without a dashboard, is the first one again.
            self._signals.interrupts = 0
            self.action_interrupt()
        self._close_after_the_end()

    @work(thread=True)
    def _send(self, request: dict[str, Any]) -> None:
        message = "stopping the run, as the launcher asks"
        try:
            self._request(self._run_dir, request)
        except ProblemError as error:
            message = str(error)
        self.call_from_thread(self.notify, message, markup=False)

    def _close_after_the_end(self) -> None:
        snapshot: RunSnapshot | None = getattr(self._run_screen, "snapshot", None)
        now = time.monotonic()
        if snapshot is None or snapshot.state in LIVE:
            self._closes_at = None
        elif self._closes_at is None:
            self._closes_at = now + self._close_after_s
            self.notify(
                f"The run has ended. In {self._close_after_s:.0f} s this screen closes and the "
                "result is printed; any key keeps it open.",
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
