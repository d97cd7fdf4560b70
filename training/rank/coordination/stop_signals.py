"""SIGTERM, SIGINT and SIGUSR1 to any rank request a stop of all ranks.

Lightning's own SIGTERM handler calls a collective inside the handler. If one rank runs Python code
and another is in an all-reduce, both wait forever. Therefore its handlers are replaced as soon as
Lightning has installed them. The replacement only sets a flag in shared memory. Lightning restores
the earlier handlers in its own teardown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any

from ltui.training.rank.lightning_internals import signal_connector

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that request a stop."""


class StopSignals:
    """Signal handlers that call ``request_stop(signum)``.

    A second SIGINT raises ``KeyboardInterrupt`` as usual.
    """

    def __init__(self, request_stop: Callable[[int], None]) -> None:
        self._request_stop = request_stop
        self._pid = os.getpid()
        self._interrupts = 0
        self._disabled = False

    def restore_defaults(self) -> None:
        """Let the signals end the process again, because no rank acts on the request any more."""
        self._disabled = True
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def install(self) -> bool:
        """Install the handlers. Return False outside the main thread, where Python allows none."""
        if self._disabled or threading.current_thread() is not threading.main_thread():
            return False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        _give_workers_own_groups()
        return True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _apply_default(signum)  # a forked child (a DataLoader worker) is not a rank
            return
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                signal.default_int_handler(signum, frame)
        self._request_stop(signum)


_rank_pid: int | None = None
"""The process whose DataLoader workers get process groups of their own."""


def _give_workers_own_groups() -> None:
    """Give forked children of ``multiprocessing`` (DataLoader workers) their own process groups.

    Torch elastic signals the process groups of its ranks. A worker that the signal kills would
    raise an exception in its rank, before the ranks have agreed to stop.

    ``os.register_at_fork`` would also affect ``subprocess.Popen`` with ``preexec_fn``, and the
    leader of a process group cannot begin a new session (``start_new_session``, ``os.setsid``).
    """
    global _rank_pid
    if _rank_pid is None:
        _rank_pid = os.getpid()
        register_after_fork(_leave_group, _leave_group)


def _leave_group(_: object) -> None:
    if os.getppid() == _rank_pid:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)


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
