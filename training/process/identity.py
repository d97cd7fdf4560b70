"""Identity of a process, which distinguishes it from later ones with its pid, and how it ended.

A process is identified by its pid, its start time (``starttime`` of ``/proc/PID/stat``) and the
boot of the machine.

Exit statuses are those of processes that are children of another process. Their parents reap them
quickly, so a thread waits on their pidfds and reads the status at once: from the zombie in
``/proc``, or from the kernel if it keeps the status for a pidfd (Linux 6.15).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from msgspec import Struct

from ltui.training.process.proc_files import ProcessEntry, command_line, entry_of, pids, read_text
from ltui.training.shared.regular_files import read_regular

LOCK_BYTES = 4096
"""Maximum size of a lock file."""


class ProcessIdentity(Struct, frozen=True):
    """A process of the current boot."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return is_alive(self.pid, self.start_ticks)


STARTING_S = 15.0
"""Seconds in which a supervisor that does not answer yet counts as starting."""


def has_just_started(process: ProcessIdentity) -> bool:
    """Return True if a process runs, is not stopped and began less than ``STARTING_S`` ago."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")
    return age_s < STARTING_S and process.alive() and not is_stopped(process.pid)


def start_ticks(pid: int) -> int | None:
    """Return the start time in clock ticks after boot; None if the process ended or is a zombie."""
    entry = entry_of(pid)
    return entry.start_ticks if entry is not None and entry.living else None


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped by SIGSTOP or a debugger."""
    entry = entry_of(pid)
    return entry is not None and entry.state in "Tt"


def is_alive(pid: int, ticks: int | None) -> bool:
    """Return True if the process that started at ``ticks`` runs.

    If ``ticks`` is 0 or None, any process with that pid counts.
    """
    current_ticks = start_ticks(pid)
    return current_ticks is not None and (not ticks or current_ticks == ticks)


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process; None if there is none with that pid."""
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessIdentity(pid, ticks)


@functools.lru_cache(maxsize=1)
def boot_id() -> str | None:
    """Return the id of the current boot, which is different after every boot."""
    return read_text("/proc/sys/kernel/random/boot_id").strip() or None


def write_lock_text(handle: int, path: Path) -> None:
    """Write the identity of this process into the lock file at ``path``: pid, start ticks, boot.

    Two more lines are the inodes of the file, which a copy of the file does not have, and of its
    directory, which a hard link in another directory does not have.
    """
    pid = os.getpid()
    identity = f"{pid}\n{start_ticks(pid) or 0}\n{boot_id() or ''}\n"
    text = f"{identity}{os.fstat(handle).st_ino}\n{path.parent.stat().st_ino}\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def release_lock(handle: int) -> None:
    """Empty a lock file that this process holds, release the lock and close the file."""
    os.ftruncate(handle, 0)
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def lock_holder(path: Path) -> ProcessIdentity | None:
    """Return the supervisor that a lock file names; None if it does not run.

    The lock of a copied directory names a process that has another directory, so it has no holder.
    """
    lines = _lock_lines(path)
    if not (lines[0].isdecimal() and lines[1].isdecimal()) or lines[2] not in ("", boot_id()):
        return None
    holder = ProcessIdentity(int(lines[0]), int(lines[1]))
    if lines[3]:
        written_here = not lock_was_copied(path)
    else:
        # A supervisor of an earlier version wrote no inode, but has the directory as an argument.
        written_here = str(path.parent) in command_line(holder.pid)
    return holder if written_here and holder.alive() else None


def lock_left_by_us(path: Path) -> bool:
    """Return True if a process of this user wrote the lock file here and died holding it.

    A lock in a directory that was copied, unpacked or given by another user does not count.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    written_here = _lock_lines(path)[3] == str(status.st_ino) and not lock_was_copied(path)
    return own and written_here and lock_holder(path) is None


def lock_was_copied(path: Path) -> bool:
    """Return True if the lock file is a copy or a hard link to that of another directory.

    Then the run's files name the processes of another run.
    """
    try:
        inodes = path.lstat().st_ino, path.parent.stat().st_ino
    except OSError:
        return False
    written = _lock_lines(path)[3:]
    return any(text not in ("", str(inode)) for text, inode in zip(written, inodes, strict=True))


def lock_from_earlier_boot(path: Path) -> bool:
    """Return True if a lock file names another boot of the machine than the current one."""
    return _lock_lines(path)[2] not in ("", boot_id())


def _lock_lines(path: Path) -> list[str]:
    try:
        text = read_regular(path, LOCK_BYTES).decode(errors="replace")
    except OSError:
        text = ""
    return [*text.split("\n"), "", "", "", "", ""][:5]


def peer_uid(link: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def any_process_has(*arguments: str) -> bool:
    """Return True if some process has all of ``arguments`` in its command line."""
    return any(set(arguments) <= set(command_line(pid)) for pid in pids())


class ProcessTable:
    """All processes, zombies included."""

    def __init__(self) -> None:
        self.entries = {pid: entry for pid in pids() if (entry := entry_of(pid)) is not None}
        self._children: dict[int, list[ProcessEntry]] = {}
        for entry in self.entries.values():
            self._children.setdefault(entry.parent, []).append(entry)

    def descendants(self, pid: int, without: Collection[int] = ()) -> Iterator[ProcessEntry]:
        """Yield the descendants of ``pid``, nearest first, but not the trees of ``without``."""
        pending = [pid]
        for parent in pending:
            children = [e for e in self._children.get(parent, ()) if e.pid not in without]
            pending += [entry.pid for entry in children]
            yield from children

    def tree(self, pid: int, without: Collection[int] = ()) -> list[int]:
        """Return the pids of the living processes among ``pid`` and its descendants."""
        root = [] if self.identity(pid) is None else [pid]
        return root + [entry.pid for entry in self.descendants(pid, without) if entry.living]

    def identity(self, pid: int) -> ProcessIdentity | None:
        """Return the identity of a living process."""
        entry = self.entries.get(pid)
        if entry is None or not entry.living:
            return None
        return ProcessIdentity(pid, entry.start_ticks)


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
