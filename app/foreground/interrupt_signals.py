"""What signals ask of a command that shows a run in the foreground."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class ReceivedSignals:
    """What this process was told by signals. Handlers only count; the loop acts."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.leave: int | None = None
        """The signal that asks this process, not the run, to end."""

    def _interrupt(self, *_: Any) -> None:
        self.interrupts += 1

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        self.leave = number

    @contextmanager
    def catching(self) -> Iterator[ReceivedSignals]:
        """Caught inside, as they were before outside."""
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
