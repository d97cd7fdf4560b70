"""What a process of a run does before its first own line: say that stacks can be read from it.

Run by the ``sitecustomize`` of the rank-side folder, so it must be light, must not raise, and must
not be noticed: no thread, no torch, nothing but a signal handler in C. faulthandler writes without
the GIL, so the stacks of a rank that hangs in an import, in a C call that holds the GIL, or before
there is a Trainer can be read; forked DataLoader workers inherit the handler.

The signal is a real-time one that nobody uses, not SIGUSR1 or SIGUSR2, which schedulers and users
take. The supervisor sends it only to a process that is seen to catch it and to hold the file.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
from typing import Any

STACK_SIGNAL = 57
"""Also in ``queue/witness.py``, which is too heavy for every start of an interpreter."""
_MARK = "LTUI_STACKS"
"""Set in what a process with a file starts: its helpers need none, its ranks do."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")

_file: Any = None
_owner = 0
"""The process that made the file; one that it forked and that is a rank takes one of its own."""


def begin() -> None:
    """Register the handler, where this process belongs to a run and may be a rank. Raises
    ``OSError``."""
    global _file, _owner
    run_dir, attempt = os.environ.get("LTUI_RUN_DIR"), os.environ.get("LTUI_ATTEMPT")
    if not run_dir or not attempt or not sys.platform.startswith("linux"):
        return
    if _MARK in os.environ and not any(name in os.environ for name in _RANK_VARIABLES):
        return
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return
    os.environ[_MARK] = "1"
    folder = os.path.join(run_dir, "evidence", attempt)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"stacks-{os.getpid()}.txt")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    before, _owner = _file, os.getpid()
    _file = os.fdopen(_out_of_the_way(os.open(path, flags, 0o600)), "ab", buffering=0)
    # The thread that takes it alone: to walk another's frames while it runs can crash.
    faulthandler.register(STACK_SIGNAL, file=_file, all_threads=False, chain=False)
    if before is not None or not faulthandler.is_enabled():
        faulthandler.enable(file=_file, all_threads=True)
    atexit.register(_tidy, path, os.getpid())


def is_handler_installed() -> bool:
    """Whether the signal still dumps this process's stacks, as far as Python knows."""
    if _file is None or _owner != os.getpid():
        return False
    return signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL


def _out_of_the_way(fd: int) -> int:
    """A high number: scripts that close or reuse low ones by habit pass it by."""
    import fcntl  # only processes of a run come here

    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 700)
    except OSError:
        return fd
    os.close(fd)
    return high


def _tidy(path: str, pid: int) -> None:
    """Leave no empty file behind."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):
        if os.path.getsize(path) == 0:
            os.unlink(path)
