"""Signals that a command receives while it shows a run in the foreground."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ltui.training.shared.defaults import STOP_TIMEOUT_S


class ReceivedSignals:
    """Counts the received signals. The handlers only count; the command's loop acts."""

    def __init__(self, *, stop_on_terminate: bool = False) -> None:
        """``stop_on_terminate``: SIGTERM, SIGUSR1 and SIGUSR2 stop the run with a checkpoint.

        A launcher sends them to every process and then ends what is left, so the command must stay
        until the run has ended.
        """
        self._stop_on_terminate = stop_on_terminate
        self.interrupts = 0
        """Number of received SIGINT."""
        self.handled_interrupts = 0
        """Number of interrupts that became requests: 0, 1 or 2."""
        self.stop_requested = False
        """True after a signal of a launcher, which asks for a stop as a person's Ctrl-C does."""
        self.leave: int | None = None
        """The signal that asks this process, not the run, to end; None before one arrives."""

    def next_request(self) -> dict[str, Any] | None:
        """Return the request of the next Ctrl-C, or None if there is none.

        The first one stops the run with a checkpoint, and the second one kills it.
        """
        interrupts = min(self.interrupts, 2)
        if interrupts <= self.handled_interrupts:
            return None
        self.handled_interrupts = interrupts
        return {"cmd": "kill"} if interrupts == 2 else {"cmd": "stop", "timeout_s": STOP_TIMEOUT_S}

    @property
    def asked_to_stop(self) -> bool:
        """True if a person has pressed Ctrl-C once, which asks for a stop, not for a kill."""
        return self.handled_interrupts == 1 and not self._stop_on_terminate

    def _interrupt(self, *_: Any) -> None:
        self.interrupts += 1

    def _stop(self, *_: Any) -> None:
        # Several signals of a launcher ask for one stop, and never for a kill.
        self.interrupts, self.stop_requested = max(self.interrupts, 1), True

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        self.leave = number

    @contextmanager
    def catching(self) -> Iterator[ReceivedSignals]:
        """Install the handlers, and restore the previous ones on exit."""
        handlers = {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._leave,
            signal.SIGHUP: self._leave,
        }
        if self._stop_on_terminate:
            handlers |= dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2), self._stop)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
