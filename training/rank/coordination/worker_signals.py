"""Stop signals do not reach the worker processes of a rank, as long as the rank lives.

SLURM signals every process of a job step, and ``pkill`` and container runtimes every process of a
session. A DataLoader worker that such a signal ends raises an exception in its rank before the
ranks have saved the checkpoint of the stop. So a ``multiprocessing`` child of a rank, which a
DataLoader worker is, ignores the stop signals. Only the rank may end it with SIGTERM, which is
how torch and ``multiprocessing`` end workers.

A Python signal handler does not know who sent a signal. Therefore the signals are blocked while the
child starts, so that all of its threads block them, and a thread waits for them with
``sigwaitinfo``.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from ltui.training.tensor_queue.control_block import STOP_SIGNALS

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
                _start(process)
                return
            process._target = functools.partial(_run_protected, os.getpid(), target)
            if (process._start_method or multiprocessing.get_start_method()) != "fork":
                # Starting the tracker later would unblock the signals again.
                resource_tracker.ensure_running()
            try:
                with _blocked():
                    _start(process)
            finally:
                process._target = target

        BaseProcess.start = start  # type: ignore[assignment,method-assign]
    _rank_pid = os.getpid()


def _run_protected(
    rank_pid: int, target: Callable[..., Any], *arguments: Any, **named: Any
) -> None:
    """Run ``target`` in a child whose stop signals are blocked."""
    # The fork server may have unblocked them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_discard_signals, args=(rank_pid,), daemon=True).start()
    # Processes that the worker starts have the usual signals.
    os.register_at_fork(after_in_child=_unblock)
    start_program = subprocess.Popen.__init__

    def start_unblocked(*popen_arguments: Any, **options: Any) -> None:
        with _unblocked():
            start_program(*popen_arguments, **options)

    subprocess.Popen.__init__ = start_unblocked  # type: ignore[method-assign]
    target(*arguments, **named)


def _discard_signals(rank_pid: int) -> None:
    """End the process if its rank has sent SIGTERM or has died; discard other stop signals."""
    parent_pid = os.getppid()  # the rank, or the fork server, which ends with the rank
    while True:
        received = signal.sigwaitinfo(STOP_SIGNALS)
        from_rank = received.si_signo == signal.SIGTERM and received.si_pid == rank_pid
        if from_rank or os.getppid() != parent_pid:
            os._exit(0)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _unblocked() -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
