"""A temporary folder for what is confidential: it does not outlive the process."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new private folder. It is removed when the block ends, also by SIGHUP or SIGTERM.

    What a process that was killed has left is removed first.
    """
    parent = Path(tempfile.gettempdir())
    for old in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            lock = _lock(old)
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    lock = -1
    with suppress(OSError):  # a file system without locks: then nobody removes it either
        lock = _lock(hidden)
    # It has its name only now, so that it is never taken for one that was left.
    folder = hidden.rename(parent / hidden.name[1:])

    def leave(number: int, _frame: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signals = [n for n in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)
        if lock >= 0:
            os.close(lock)


def _lock(folder: Path) -> int:
    """Return the lock of a folder of this user. Raises ``OSError`` if a process has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError(str(folder))
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
