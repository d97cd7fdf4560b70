"""What the machine says: memory and its limits, kills for want of it, shared memory, sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from ltui.training.diagnosis.evidence import HostEvidence

_NO_LIMIT = 1 << 60
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where DataLoader workers put their batches
_CGROUP = Path("/sys/fs/cgroup")


def read_host(pid: int | None = None, kills_before: int | None = None) -> HostEvidence:
    """``pid``: a rank, whose control group is looked at. ``kills_before``: ``oom_kills`` as the
    attempt began."""
    memory = _meminfo()
    used, limit = group_memory(pid)
    kills = oom_kills(pid)
    shm = _space(_SHARED_MEMORY)
    return HostEvidence(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory_available_bytes=memory.get("MemAvailable"),
        memory_total_bytes=memory.get("MemTotal"),
        memory_limit_bytes=limit,
        memory_used_bytes=used,
        oom_kills=None if kills is None else max(0, kills - (kills_before or 0)),
        shm_free_bytes=shm[0] if shm else None,
        shm_total_bytes=shm[1] if shm else None,
    )


def oom_kills(pid: int | None = None) -> int | None:
    """The kernel's count of processes killed for want of memory, since boot."""
    for line in _lines("/proc/vmstat"):
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return _group_kills(pid)


def group_memory(pid: int | None) -> tuple[int | None, int | None]:
    """(used, limit) bytes of the control group; None where there is none or no limit."""
    for folder in _groups(pid):
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            cache = _file_cache(folder)
            return (None if used is None else max(0, used - cache)), limit
    return None, None


def unacknowledged_tcp(pid: int) -> tuple[int, int] | None:
    """(bytes sent and not acknowledged, retransmits) over the process's TCP connections."""
    inodes = _socket_inodes(pid)
    if not inodes:
        return None
    waiting = again = 0
    for name in ("tcp", "tcp6"):
        for line in _lines(f"/proc/{pid}/net/{name}")[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] in inodes and fields[3] in ("01", "02", "04"):
                waiting += int(fields[4].partition(":")[0], 16)
                again += int(fields[6], 16)
    return waiting, again


def _socket_inodes(pid: int) -> set[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return set()
    found = set()
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _group_kills(pid: int | None) -> int | None:
    for folder in _groups(pid):
        for name in ("memory.events", "memory.oom_control"):
            for line in _lines(str(folder / name)):
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _groups(pid: int | None) -> Iterable[Path]:
    """The folders of the process's control group, version 2 and 1, also as a container sees
    them."""
    paths = []
    for line in _lines(f"/proc/{pid or 'self'}/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths += [_CGROUP / path.strip("/"), _CGROUP]
        elif "memory" in controllers.split(","):
            paths += [_CGROUP / "memory" / path.strip("/"), _CGROUP / "memory"]
    return [p for p in paths if p.is_dir()]


def _file_cache(folder: Path) -> int:
    """Cache of files, which the kernel gives back before it kills. Memory in ``/dev/shm`` is not
    of it."""
    found = {}
    for line in _lines(str(folder / "memory.stat")):
        name, _, value = line.partition(" ")
        found[name] = value
    # Version 1 says with "total" what groups below hold too.
    names = ("inactive_file", "active_file")
    return sum(int(found.get(f"total_{name}", found.get(name, 0))) for name in names)


def _meminfo() -> dict[str, int]:
    found = {}
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields:
            found[name] = int(fields[0]) * 1024
    return found


def _space(path: str) -> tuple[int, int] | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
