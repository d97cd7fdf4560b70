"""Identity of processes, which distinguishes a process from later ones with the same pid.

A process is identified by its pid, its start time (``starttime`` of ``/proc/PID/stat``) and the
boot of the machine.
"""

from __future__ import annotations

import fcntl
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from ltui.training.process.proc_files import command_line, entry_of, pids, read_text
from ltui.training.process.regular_files import read_regular

LOCK_BYTES = 4096
"""Maximum size of a lock file."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of the current boot."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return is_alive(self.pid, self.start_ticks)


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


def write_lock_text(handle: int) -> None:
    """Write the identity of this process into a lock file: pid, start ticks, boot."""
    pid = os.getpid()
    text = f"{pid}\n{start_ticks(pid) or 0}\n{boot_id() or ''}\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def release_lock(handle: int) -> None:
    """Empty a lock file that this process holds, release the lock and close the file."""
    os.ftruncate(handle, 0)
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def lock_holder(path: Path) -> ProcessIdentity | None:
    """Return the supervisor that a lock file names; None if it does not run."""
    lines = _lock_lines(path)
    if not (lines[0].isdecimal() and lines[1].isdecimal()) or lines[2] not in ("", boot_id()):
        return None
    holder = ProcessIdentity(int(lines[0]), int(lines[1]))
    return holder if holder.alive() else None


def lock_from_earlier_boot(path: Path) -> bool:
    """Return True if a lock file names another boot of the machine than the current one."""
    return _lock_lines(path)[2] not in ("", boot_id())


def _lock_lines(path: Path) -> list[str]:
    try:
        text = read_regular(path, LOCK_BYTES).decode(errors="replace")
    except OSError:
        text = ""
    return [*text.split("\n"), "", "", ""][:3]


def any_process_has(*arguments: str) -> bool:
    """Return True if some process has all of ``arguments`` in its command line."""
    return any(set(arguments) <= set(command_line(pid)) for pid in pids())
