"""SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 to any rank request a stop of all ranks.

Lightning's own SIGTERM handler calls a collective inside the handler. If one rank runs Python code
and another is in an all-reduce, both wait forever. Therefore its handlers are replaced as soon as
Lightning has installed them. The replacement only sets a flag in shared memory. Lightning restores
the earlier handlers in its own teardown.

Stop signals do not reach the worker processes of a rank, as long as the rank lives. SLURM signals
every process of a job step, and ``pkill`` and container runtimes every process of a session. A
DataLoader worker that such a signal ends raises an exception in its rank before the ranks have
saved the checkpoint of the stop. So a ``multiprocessing`` child of a rank, which a DataLoader
worker is, ignores the stop signals. Only the rank may end it with SIGTERM, which is how torch and
``multiprocessing`` end workers.

A Python signal handler does not know who sent a signal. Therefore the signals are blocked while the
child starts, so that all of its threads block them, and a thread waits for them with
``sigwaitinfo``. A signal for which the child installs a handler of its own goes to that handler.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from ltui.training.rank.lightning_internals import signal_connector
from ltui.training.tensor_queue.control_block import STOP_SIGNALS

_STARTS_OF_PROGRAMS: tuple[tuple[Any, str], ...] = (
    *((subprocess.Popen, "__init__"), (BaseProcess, "start")),
    *((os, "system"), (os, "posix_spawn"), (os, "posix_spawnp")),
)
"""Owners and names of the functions by which a worker starts a process without ``os.fork``."""
_LOADER_WORKERS = "torch.utils.data"
"""Prefix of the modules of torch's workers, which end with 0 if their rank sends SIGTERM."""

_rank_pid: int | None = None
"""The process whose ``multiprocessing`` children ignore the stop signals."""


def protect_workers() -> None:
    """Let ``multiprocessing`` children that this process starts ignore the stop signals."""
    global _rank_pid
    if _rank_pid is None:
        _start = BaseProcess.start

        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            if os.getpid() != _rank_pid or target is None:
                # A fork server that was started for a worker blocks the signals in its children.
                process._unblock_when_unpickled = _UnblockWhenUnpickled()
                _start(process)
                return
            process._target = functools.partial(_run_protected, os.getpid(), target)
            method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
            if method != "fork":
                # Starting the tracker later would unblock the signals again.
                resource_tracker.ensure_running()
            try:
                with _masked(signal.SIG_BLOCK):
                    _start(process)
            finally:
                if "_target" in vars(process):  # a started process has deleted it
                    process._target = target

        BaseProcess.start = start  # type: ignore[assignment,method-assign]
    _rank_pid = os.getpid()


class _UnblockWhenUnpickled:
    """Unblocks the stop signals in the process that unpickles it, and becomes None there."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _unblock, ()


def _run_protected(
    rank_pid: int, target: Callable[..., Any], *arguments: Any, **named: Any
) -> None:
    """Run ``target`` in a child whose stop signals are blocked."""
    # The fork server may have unblocked them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has inherited the rank's handler
    handled: set[int] = set()
    is_loader_worker = str(getattr(target, "__module__", "")).startswith(_LOADER_WORKERS)
    arguments_of_thread = rank_pid, handled, is_loader_worker
    threading.Thread(target=_discard_signals, args=arguments_of_thread, daemon=True).start()
    # Processes that the worker starts have the usual signals.
    os.register_at_fork(after_in_child=_unblock)
    for owner, name in _STARTS_OF_PROGRAMS:
        setattr(owner, name, _with_signals_unblocked(getattr(owner, name)))
    set_handler = signal.signal

    @functools.wraps(set_handler)
    def set_handler_and_unblock(number: int, handler: Any) -> Any:
        previous = set_handler(number, handler)
        if number in STOP_SIGNALS and handler != signal.SIG_DFL:
            handled.add(int(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        return previous

    signal.signal = set_handler_and_unblock  # type: ignore[assignment]
    target(*arguments, **named)


def _discard_signals(rank_pid: int, handled: set[int], is_loader_worker: bool) -> None:
    """End the process if its rank has sent SIGTERM or has died; discard other stop signals.

    The signals ``handled`` go to the main thread.
    """
    parent_pid = os.getppid()  # the rank, or the fork server, which ends with the rank
    while True:
        received = signal.sigwaitinfo(STOP_SIGNALS)
        if received.si_signo in handled:
            signal.pthread_kill(threading.main_thread().ident or 0, received.si_signo)
            continue
        from_rank = received.si_signo == signal.SIGTERM and received.si_pid == rank_pid
        if from_rank and not is_loader_worker:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
            signal.raise_signal(signal.SIGTERM)
        if from_rank or os.getppid() != parent_pid:
            os._exit(0)


def _with_signals_unblocked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with _masked(signal.SIG_UNBLOCK):
            return function(*arguments, **named)

    return call


@contextlib.contextmanager
def _masked(how: int) -> Iterator[None]:
    """Block or unblock (``SIG_BLOCK``, ``SIG_UNBLOCK``) this thread's stop signals meanwhile."""
    mask = signal.pthread_sigmask(how, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


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
    signal_connector(trainer).register_signal_handlers = lambda: None


class RunStopped(SystemExit):
    """Ends ``trainer.fit`` on a rank after all ranks agreed to stop.

    The exit code is 0, so that launchers count the rank as finished.

    ``except Exception`` in a user's script does not catch a ``SystemExit``, so nothing after
    ``fit`` runs there. Lightning tears its loops down on the way, which ends the DataLoader's
    workers.
    """

    def __init__(self, global_step: int) -> None:
        super().__init__(0)
        self.global_step = global_step
