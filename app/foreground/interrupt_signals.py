"""Signals that a command receives while it shows a run in the foreground."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class ReceivedSignals:
    """Counts the received signals. The handlers only count; the command's loop acts."""

    def __init__(self) -> None:
        self.interrupts = 0
        """Number of received SIGINT."""
        self.leave: int | None = None
        """The signal that asks this process, not the run, to end; None before one arrives."""

    def _interrupt(self, *_: Any) -> None:
        self.interrupts += 1

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
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
