"""SIGTERM, SIGINT and SIGUSR1 to any rank ask for the agreed stop.

Lightning's own SIGTERM handler calls a collective inside the handler: where one rank is in Python
and another in an all-reduce, both wait for ever. So its handlers are replaced as soon as Lightning
has put them in place, by one that only raises a flag in shared memory; Lightning puts the earlier
ones back in its own teardown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Handlers that call ``request_stop(signum)``; a second SIGINT is a ``KeyboardInterrupt`` as
    usual."""

    def __init__(self, request_stop: Callable[[int], None]) -> None:
        self._raise_flag = request_stop
        self._pid = os.getpid()
        self._interrupts = 0
        self._off = False

    def restore_defaults(self) -> None:
        """Let the signals end the process again: nobody acts on the flag any more."""
        self._off = True
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def install(self) -> bool:
        """False in a thread other than the main one, where Python allows no handlers."""
        if self._off or threading.current_thread() is not threading.main_thread():
            return False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        _keep_workers_out_of_it()
        return True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _as_by_default(signum)  # a forked child (a DataLoader worker) is not a rank
            return
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                signal.default_int_handler(signum, frame)
        self._raise_flag(signum)


_kept_out_in: int | None = None


def _keep_workers_out_of_it() -> None:
    """Give forked children (DataLoader workers) process groups of their own.

    Torch elastic signals the groups of its ranks. A worker that dies of that takes its rank along
    by an exception, before the stop has been agreed on.
    """
    global _kept_out_in
    if _kept_out_in is None:
        _kept_out_in = os.getpid()
        os.register_at_fork(after_in_child=_leave_group)


def _leave_group() -> None:
    if os.getppid() == _kept_out_in:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)


def _as_by_default(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def replace_lightning_handlers(trainer: Any, signals: StopSignals) -> None:
    """Have ``signals`` in place whenever Lightning has registered its own handlers."""
    connector = trainer._signal_connector
    register = connector.register_signal_handlers

    def register_and_replace() -> None:
        register()
        signals.install()

    connector.register_signal_handlers = register_and_replace
