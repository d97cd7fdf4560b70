"""A lock that writers of a file hold in turn."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

TIMEOUT_S = 15.0
"""Seconds to wait for the lock, which is held for a moment."""
_POLL_S = 0.01


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of this file, which is created, after other processes and threads.

    A symbolic link in its place is removed. Raises ``OSError`` if the file cannot be created, or if
    another process does not release it.
    """
    if path.is_symlink():
        path.unlink()
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path, flags, 0o600)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not _locked(lock):
            if time.monotonic() > deadline:
                what = f"another process has locked {path} for {TIMEOUT_S:.0f} s: is one stopped?"
                raise OSError(errno.EAGAIN, what)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
