"""How processes that are somebody else's children ended.

Their parents reap them within a moment, so a thread waits at their pidfds and asks at once: of the
kernel where it keeps the status for holders of a pidfd (from 6.15 on), else of the zombie.
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
from pathlib import Path

_INFO = struct.Struct("<QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""``PIDFD_GET_INFO``."""
_WANTED = 1 << 3
"""``PIDFD_INFO_EXIT``."""
_EXIT_CODE = 49
"""Place of ``exit_code`` in the fields of ``/proc/PID/stat`` from the state on."""
_LOOK_MS = 1000
_TRIES, _AGAIN_S = 3, 0.01


class ExitWatch:
    """Waits for the ends of processes; ``ended`` is called, in the watching thread, at each."""

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
        """Watch ``pid``; of one that is gone already nothing will be known."""
        with self._lock:
            if pid in self._status or pid in self._handles.values() or self._closing:
                return
            with contextlib.suppress(OSError, AttributeError):  # gone; a kernel without pidfds
                self._handles[os.pidfd_open(pid)] = pid
                os.write(self._wake_in, b"x")

    def status(self, pid: int) -> int | None:
        """The wait status; None where nobody saw it (yet)."""
        return self._status.get(pid)

    def close(self) -> None:
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
            for handle, _ in poll.poll(_LOOK_MS):
                if handle == self._wake_out:
                    with contextlib.suppress(OSError):
                        os.read(self._wake_out, 4096)
                else:
                    self._note(handle)
        with self._lock:
            for handle in (*self._handles, self._wake_out, self._wake_in):
                os.close(handle)
            self._handles.clear()

    def _note(self, handle: int) -> None:
        pid = self._handles[handle]
        status = None
        for _ in range(_TRIES):
            status = _of_zombie(pid)
            if status is None:
                status = _of_handle(handle)
            if status is not None:
                break
            time.sleep(_AGAIN_S)
        with self._lock:
            self._status[pid] = status
            del self._handles[handle]
        os.close(handle)
        self._ended()


def _of_zombie(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) <= _EXIT_CODE or fields[0] not in (b"Z", b"X"):
        return None
    return int(fields[_EXIT_CODE])


def _of_handle(handle: int) -> int | None:
    block = bytearray(_INFO.pack(_WANTED, *([0] * 13)))
    try:
        fcntl.ioctl(handle, _GET_INFO, block)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(block)
    return int(status) if mask & _WANTED else None
