"""Install signal handlers that dump Python stacks, before a process of a run executes its script.

The ``sitecustomize`` of the rank package calls it. So it must be light, must not raise, and must
not disturb the process: no thread, no torch, only two signal handlers. Forked DataLoader workers
inherit them.

A thread that runs Python handles ``INTERPRETER_STACK_SIGNAL`` between two instructions. A thread
that waits in a C call does not. faulthandler handles ``STACK_SIGNAL`` in C, at once and without the
GIL. So the stacks can be read of a rank that hangs in an import, in a C call that holds the GIL, or
before there is a Trainer. It can crash a thread that runs Python, because the frames may be
incomplete: in a loop of calls, one signal in about 2,000 did.

The signals are real-time signals that are otherwise unused. SIGUSR1 and SIGUSR2 are used by
schedulers and by users. The supervisor sends them only to a process that catches them and has the
file open.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import os
import signal
import sys
from typing import Any

STACK_SIGNAL, INTERPRETER_STACK_SIGNAL = 57, 58
"""Same as in ``tensor_queue/heartbeat_table.py``, whose import is too slow for every start of an
interpreter."""
_MAX_FRAMES = 100
"""Frames of a stack that are written, as by faulthandler."""
_MARKER_VARIABLE = "LTUI_STACKS"
"""Set by a process that has a file, so that its helper processes create none. Its ranks do."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")

_file: Any = None
_owner = 0
"""The process that created the file. A forked child that is a rank creates its own."""
_folder = ""
"""The folder of the file, to which samples are written too."""


def install_handler() -> None:
    """Register the handlers if this process belongs to a run and may be a rank.

    Only the main thread can install the one for ``INTERPRETER_STACK_SIGNAL``.

    Raises ``OSError``.
    """
    global _file, _owner, _folder
    run_dir, attempt = os.environ.get("LTUI_RUN_DIR"), os.environ.get("LTUI_ATTEMPT")
    if not run_dir or not attempt or not sys.platform.startswith("linux"):
        return
    if _MARKER_VARIABLE in os.environ and not any(name in os.environ for name in _RANK_VARIABLES):
        return
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return
    os.environ[_MARKER_VARIABLE] = "1"
    _folder = os.path.join(run_dir, "evidence", attempt)
    os.makedirs(_folder, mode=0o700, exist_ok=True)
    path = os.path.join(_folder, f"stacks-{os.getpid()}.txt")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    previous_file, _owner = _file, os.getpid()
    _file = os.fdopen(_move_to_high_number(os.open(path, flags, 0o600)), "ab", buffering=0)
    # Only the thread that gets the signal: reading the frames of a running thread can crash.
    faulthandler.register(STACK_SIGNAL, file=_file, all_threads=False, chain=False)
    if signal.getsignal(INTERPRETER_STACK_SIGNAL) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(INTERPRETER_STACK_SIGNAL, _write_stack)
            signal.siginterrupt(INTERPRETER_STACK_SIGNAL, False)
    if previous_file is not None or not faulthandler.is_enabled():
        faulthandler.enable(file=_file, all_threads=True)
    atexit.register(_remove_empty_file, path, os.getpid())


def is_handler_installed() -> bool:
    """Return True if the signal still dumps this process's stacks, as far as Python knows."""
    if _file is None or _owner != os.getpid():
        return False
    unchanged = (signal.SIG_DFL, _write_stack)
    return all(
        signal.getsignal(number) in unchanged for number in (STACK_SIGNAL, INTERPRETER_STACK_SIGNAL)
    )


def _write_stack(_number: int, frame: Any) -> None:
    """Write the stack of the main thread in the format of faulthandler."""
    with contextlib.suppress(Exception):  # it interrupts the user's code
        if _samples_instead():
            return
    lines = ["Stack (most recent call first):"]
    while frame is not None and len(lines) <= _MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    with contextlib.suppress(Exception):
        _file.write("\n".join([*lines, ""]).encode(errors="replace"))


def _samples_instead() -> bool:
    """Begin to sample the main thread, and return True, if the supervisor has requested that.

    So it asks a forked worker, which has no heartbeat thread.
    """
    path = os.path.join(_folder, f"sample-{os.getpid()}")
    if not os.path.exists(path):
        return False
    with open(path, encoding="ascii") as file:
        request = int(file.read())
    os.unlink(path)

    def work(main: int) -> None:
        # Imported here: it is too slow for every start of an interpreter, and for a signal handler.
        from ltui.training.rank.stack_sampler import sample

        sample(main, _folder, request)

    _thread.start_new_thread(work, (_thread.get_ident(),))
    return True


def _move_to_high_number(fd: int) -> int:
    """Duplicate ``fd`` to a high number, because some scripts close or reuse low numbers."""
    import fcntl  # imported here: only processes of a run need it

    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 700)
    except OSError:
        return fd
    os.close(fd)
    return high


def _remove_empty_file(path: str, pid: int) -> None:
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):
        if os.path.getsize(path) == 0:
            os.unlink(path)
