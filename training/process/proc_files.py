"""Readers of ``/proc``. A process that ended, or that is another user's, gives an empty result."""

from __future__ import annotations

import os

from msgspec import Struct

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATE, _PARENT, _FLAGS, _USER, _SYSTEM, _STARTED, _RESIDENT = 0, 1, 6, 11, 12, 19, 21
_EXIT_CODE = 49
"""Indices of the fields of ``/proc/PID/stat`` after the name."""
_PF_EXITING = 0x4
"""Flag of a process that has ended and whose resources the kernel frees."""


class ProcessEntry(Struct, frozen=True):
    """One process, zombies included."""

    pid: int
    parent: int
    name: str
    state: str
    start_ticks: int
    cpu_ticks: int
    rss_bytes: int
    exit_status: int | None
    """Wait status of a zombie; None for a living process."""
    exiting: bool = False
    """True from when it has ended until it is gone, also while it is no zombie yet."""

    @property
    def living(self) -> bool:
        return self.state not in "ZX"


def entry_of(pid: int) -> ProcessEntry | None:
    """Return one process; None if there is none with that pid."""
    # The name is in parentheses and may contain anything; the fields after it are fixed.
    head, _, rest = _read(f"/proc/{pid}/stat").rpartition(b")")
    fields = rest.split()
    if len(fields) <= _RESIDENT:
        return None
    state = fields[_STATE].decode()
    has_exit_code = state in "ZX" and len(fields) > _EXIT_CODE
    return ProcessEntry(
        pid=pid,
        parent=int(fields[_PARENT]),
        name=head.partition(b"(")[2].decode(errors="replace"),
        state=state,
        start_ticks=int(fields[_STARTED]),
        cpu_ticks=int(fields[_USER]) + int(fields[_SYSTEM]),
        rss_bytes=int(fields[_RESIDENT]) * _PAGE_BYTES,
        exit_status=int(fields[_EXIT_CODE]) if has_exit_code else None,
        exiting=bool(int(fields[_FLAGS]) & _PF_EXITING),
    )


def pids() -> list[int]:
    """Return the pids of all processes."""
    return _numbers("/proc")


def threads_of(pid: int) -> list[int]:
    """Return the ids of all threads, the main thread first; empty if the process ended."""
    return sorted(_numbers(f"/proc/{pid}/task"), key=lambda thread: thread != pid)


def processor_times(pid: int, thread: int) -> tuple[int, int] | None:
    """Return how long a thread has run and has waited for a processor, in nanoseconds.

    Return None if it ended.
    """
    times = read_text(f"/proc/{pid}/task/{thread}/schedstat").split()
    return (int(times[0]), int(times[1])) if len(times) > 1 else None


def environment(pid: int) -> dict[str, str]:
    """Return the environment at the start of a process; empty if it cannot be read."""
    entries = _read(f"/proc/{pid}/environ").split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty if they cannot be read."""
    return [os.fsdecode(argument) for argument in _read(f"/proc/{pid}/cmdline").split(b"\0")]


def open_files(pid: int) -> list[str]:
    """Return the targets of all file descriptors, the newest descriptor first."""
    targets = []
    for number in sorted(_numbers(f"/proc/{pid}/fd"), reverse=True):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        except OSError:
            continue
    return targets


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the content of a file; an empty string if it cannot be read."""
    return _read(path).decode(errors="replace")


def read_pairs(path: str | os.PathLike[str], separator: str = ":") -> dict[str, str]:
    """Return the lines ``key: value`` of a file."""
    pairs = (line.partition(separator) for line in read_text(path).splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _numbers(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []
