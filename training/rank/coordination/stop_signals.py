"""SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 to any rank request a stop of all ranks.

Lightning's own SIGTERM handler calls a collective inside the handler. If one rank runs Python code
and another is in an all-reduce, both wait forever. Therefore its handlers are replaced as soon as
Lightning has installed them. The replacement only sets a flag in shared memory. Lightning restores
the earlier handlers in its own teardown.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ltui.training.rank.coordination.worker_signals import protect_workers
from ltui.training.rank.lightning_internals import signal_connector
from ltui.training.tensor_queue.control_block import STOP_SIGNALS

REPEAT_S = 1.0
"""Seconds in which further SIGINTs count as the first one.

SLURM and torch elastic may both send it to a rank.
"""


class StopSignals:
    """Signal handlers that call ``request_stop(signum)``.

    A later second SIGINT raises ``KeyboardInterrupt`` as usual.
    """

    def __init__(self, request_stop: Callable[[int], None]) -> None:
        self._request_stop = request_stop
        self._pid = os.getpid()
        self._interrupted_at: float | None = None
        self._disabled = False

    def restore_defaults(self) -> None:
        """Let the signals end the process again, because no rank acts on the request any more."""
        self._disabled = True
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGUSR2 or signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def install(self) -> bool:
        """Install the handlers. Return False outside the main thread, where Python allows none."""
        if self._disabled or threading.current_thread() is not threading.main_thread():
            return False
        for number in STOP_SIGNALS:
            # SIGUSR2 belongs to the script if it has a handler of its own.
            if number != signal.SIGUSR2 or signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._handle)
        # They are blocked in a child of another rank, which ``torch.multiprocessing`` may start.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        protect_workers()
        return True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _apply_default(signum)  # a forked child (a DataLoader worker) is not a rank
            return
        if signum == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at > REPEAT_S:
                signal.default_int_handler(signum, frame)
        self._request_stop(signum)


def _apply_default(signum: int) -> None:
    """Do what the signal does without a handler."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def replace_lightning_handlers(trainer: Any, signals: StopSignals) -> None:
    """Install ``signals`` whenever Lightning has registered its own handlers."""
    connector = signal_connector(trainer)
    register = connector.register_signal_handlers

    def register_and_replace() -> None:
        register()
        signals.install()

    connector.register_signal_handlers = register_and_replace


def disable_lightning_handlers(trainer: Any) -> None:
    """Keep Lightning from registering handlers. Its SIGTERM handler waits for the other ranks."""
    signal_connector(trainer).register_signal_handlers = _register_nothing


def _register_nothing() -> None:
    """Replace Lightning's ``register_signal_handlers``."""
