"""Exit statuses of processes that are children of another process.

Their parents reap them quickly, so a thread waits on their pidfds and reads the status at once:
from the zombie in ``/proc``, or from the kernel if it keeps the status for a pidfd (Linux 6.15).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Callable

from ltui.training.process.proc_files import entry_of

_INFO = struct.Struct("<QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""Number of the ioctl ``PIDFD_GET_INFO``."""
_INFO_EXIT = 1 << 3
"""Flag ``PIDFD_INFO_EXIT``: request the exit status."""
_POLL_TIMEOUT_MS = 1000
_TRIES, _RETRY_S = 3, 0.01
"""Number of attempts to read a status, and seconds between them."""


class ExitWatch:
    """Waits for processes to end; calls ``ended`` in its own thread whenever one does."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._handles: dict[int, int] = {}
        self._status: dict[int, int | None] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="exits", daemon=True)
        self._thread.start()

    def add(self, pid: int) -> None:
        """Watch a process. The status of a process that has already ended stays unknown."""
        with self._lock:
            if pid in self._status or pid in self._handles.values() or self._closing:
                return
            with contextlib.suppress(OSError, AttributeError):  # ended, or no pidfds
                self._handles[os.pidfd_open(pid)] = pid
                os.write(self._wake_in, b"x")

    def status(self, pid: int) -> int | None:
        """Return the wait status; None if it is unknown or the process runs."""
        return self._status.get(pid)

    def close(self) -> None:
        """Stop the thread and close all pidfds."""
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"x")
        self._thread.join(2.0)

    def _watch(self) -> None:
        while not self._closing:
            poll = select.poll()
            poll.register(self._wake_out, select.POLLIN)
            for handle in list(self._handles):
                poll.register(handle, select.POLLIN)
            for handle, _ in poll.poll(_POLL_TIMEOUT_MS):
                if handle == self._wake_out:
                    with contextlib.suppress(OSError):
                        os.read(self._wake_out, 4096)
                else:
                    self._record_status(handle)
        with self._lock:
            for handle in (*self._handles, self._wake_out, self._wake_in):
                os.close(handle)
            self._handles.clear()

    def _record_status(self, handle: int) -> None:
        pid = self._handles[handle]
        status: int | None = None
        for _ in range(_TRIES):
            entry = entry_of(pid)
            status = None if entry is None else entry.exit_status
            if status is None:
                status = _status_of_pidfd(handle)
            if status is not None:
                break
            time.sleep(_RETRY_S)
        with self._lock:
            self._status[pid] = status
            del self._handles[handle]
        os.close(handle)
        self._ended()


def _status_of_pidfd(handle: int) -> int | None:
    block = bytearray(_INFO.pack(_INFO_EXIT, *([0] * 13)))
    try:
        fcntl.ioctl(handle, _GET_INFO, block)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(block)
    return int(status) if mask & _INFO_EXIT else None
