"""State of the machine: memory and its limits, out-of-memory kills, shared memory, TCP sockets."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.process.proc_files import open_files, read_pairs, read_text

_NO_LIMIT = 1 << 60
"""Limits from this number of bytes on mean that there is no limit."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - DataLoader workers put their batches there
_CGROUP = Path("/sys/fs/cgroup")


def read_host(pid: int | None = None, kills_before: int | None = None) -> HostEvidence:
    """Read the state of the machine.

    ``pid`` is a rank; its control group is inspected. ``kills_before`` is the number of
    out-of-memory kills when the attempt started.
    """
    memory = read_pairs("/proc/meminfo")
    used, limit = group_memory(pid)
    kills = oom_kills(pid)
    try:
        shm = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        shm = None
    return HostEvidence(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory_available_bytes=_kibibytes(memory.get("MemAvailable")),
        memory_total_bytes=_kibibytes(memory.get("MemTotal")),
        memory_limit_bytes=limit,
        memory_used_bytes=used,
        oom_kills=None if kills is None else max(0, kills - (kills_before or 0)),
        shm_free_bytes=shm.free if shm else None,
        shm_total_bytes=shm.total if shm else None,
    )


def oom_kills(pid: int | None = None) -> int | None:
    """Return the number of processes that the kernel killed since boot because memory ran out."""
    counts = [read_pairs("/proc/vmstat", " ")]
    for folder in _group_folders(pid):
        counts += [read_pairs(folder / n, " ") for n in ("memory.events", "memory.oom_control")]
    return next((int(count["oom_kill"]) for count in counts if "oom_kill" in count), None)


def group_memory(pid: int | None) -> tuple[int | None, int | None]:
    """Return the used and maximum bytes of the control group; None if there is no limit."""
    for folder in _group_folders(pid):
        used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes")
        limit = _read_int(folder / "memory.max") or _read_int(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            cache = _file_cache(folder)
            return (None if used is None else max(0, used - cache)), limit
    return None, None


def unacknowledged_tcp(pid: int) -> tuple[int, int] | None:
    """Return (bytes not acknowledged, retransmits) over the TCP connections of a process."""
    inodes = {target[8:-1] for target in open_files(pid) if target.startswith("socket:[")}
    if not inodes:
        return None
    waiting = retransmits = 0
    for name in ("tcp", "tcp6"):
        for line in read_text(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] in inodes and fields[3] in ("01", "02", "04"):
                waiting += int(fields[4].partition(":")[0], 16)
                retransmits += int(fields[6], 16)
    return waiting, retransmits


def _group_folders(pid: int | None) -> Iterable[Path]:
    """Return the folders of the process's control group (versions 2 and 1).

    The paths as seen in a container are included.
    """
    paths = []
    for line in read_text(f"/proc/{pid or 'self'}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths += [_CGROUP / path.strip("/"), _CGROUP]
        elif "memory" in controllers.split(","):
            paths += [_CGROUP / "memory" / path.strip("/"), _CGROUP / "memory"]
    return [p for p in paths if p.is_dir()]


def _file_cache(folder: Path) -> int:
    """Return the bytes of the file cache, which the kernel frees before it kills a process.

    Memory in ``/dev/shm`` is not part of it.
    """
    values = read_pairs(folder / "memory.stat", " ")
    # In version 1 the values with "total" include the groups below.
    names = ("inactive_file", "active_file")
    return sum(int(values.get(f"total_{name}", values.get(name, 0))) for name in names)


def _kibibytes(value: str | None) -> int | None:
    """Return the bytes of a value such as ``131072 kB``."""
    return None if value is None else int(value.split()[0]) * 1024


def _read_int(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None
