"""Identity of processes, which distinguishes a process from later ones with the same pid.

A process is identified by its pid, its start time (``starttime`` of ``/proc/PID/stat``) and the
boot of the machine. Reads ``/proc`` only.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of the current boot."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return is_alive(self.pid, self.start_ticks)


def stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None if the process ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Return the start time in clock ticks after boot; None if the process ended or is a zombie."""
    fields = stat_fields(pid)
    if fields is None or len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped by SIGSTOP or a debugger."""
    fields = stat_fields(pid)
    return fields is not None and fields[0] in (b"T", b"t")


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
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def write_lock_text(handle: int) -> None:
    """Write the identity of this process into a lock file: pid, start ticks, boot."""
    pid = os.getpid()
    text = f"{pid}\n{start_ticks(pid) or 0}\n{boot_id() or ''}\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def lock_holder(path: Path) -> ProcessIdentity | None:
    """Return the supervisor that a lock file names; None if it does not run."""
    try:
        lines = path.read_text().split("\n")
        holder = ProcessIdentity(int(lines[0]), int(lines[1]))
    except (OSError, ValueError, IndexError):
        return None
    same_boot = len(lines) < 3 or lines[2] in ("", boot_id())
    return holder if same_boot and holder.alive() else None


def any_process_has(*arguments: str) -> bool:
    """Return True if some process has all of ``arguments`` in its command line."""
    needed = {os.fsencode(argument) for argument in arguments}
    for pid in pids():
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if needed <= set(argv):
            return True
    return False


def pids() -> list[int]:
    """Return the pids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> dict[str, str]:
    """Return the environment at the start of a process; empty if it cannot be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}
