"""Which processes are alive, told apart from later ones that were given the same number.

A process is known by its pid, the moment it started (``starttime`` of ``/proc/PID/stat``) and the
boot it belongs to. Reads ``/proc`` only.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return is_alive(self.pid, self.start_ticks)


def stat_fields(pid: int) -> list[bytes] | None:
    """The fields of ``/proc/PID/stat`` from the state on; None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks after boot; None where it is gone or a zombie."""
    fields = stat_fields(pid)
    if fields is None or len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped: by SIGSTOP, or by a debugger."""
    fields = stat_fields(pid)
    return fields is not None and fields[0] in (b"T", b"t")


def is_alive(pid: int, ticks: int | None) -> bool:
    """Whether the process that started at ``ticks`` runs; any of that pid where ``ticks`` is 0."""
    now = start_ticks(pid)
    return now is not None and (not ticks or now == ticks)


def identify(pid: int) -> ProcessIdentity | None:
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessIdentity(pid, ticks)


@functools.lru_cache(maxsize=1)
def boot_id() -> str | None:
    """Another one after every boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def write_lock_text(handle: int) -> None:
    """Say in the lock file who holds it: pid, start ticks, boot."""
    pid = os.getpid()
    text = f"{pid}\n{start_ticks(pid) or 0}\n{boot_id() or ''}\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def lock_holder(path: Path) -> ProcessIdentity | None:
    """The live supervisor that a lock file names; None where it names none that is alive."""
    try:
        lines = path.read_text().split("\n")
        mark = ProcessIdentity(int(lines[0]), int(lines[1]))
    except (OSError, ValueError, IndexError):
        return None
    same_boot = len(lines) < 3 or lines[2] in ("", boot_id())
    return mark if same_boot and mark.alive() else None


def any_process_has(*arguments: str) -> bool:
    """Whether some process was started with all of ``arguments`` among its own."""
    wanted = {os.fsencode(argument) for argument in arguments}
    for pid in pids():
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted <= set(argv):
            return True
    return False


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> dict[str, str]:
    """What the process was started with; empty where it is gone or another user's."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}
