"""What of the machine a rank may count on. Linux, standard library."""

from __future__ import annotations

import os
from pathlib import Path


def cores_per_rank() -> int:
    """Cores that this process may use, shared out between the ranks of the machine; at least 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def available_bytes() -> int | None:
    """Memory that could still be used, of the machine or of the control group, whichever is less;
    None where neither says."""
    found = [n for n in (_of_machine(), _of_group()) if n is not None]
    return min(found) if found else None


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _of_group() -> int | None:
    """By the limit of this process's own group; that of a container is at the root."""
    root = Path("/sys/fs/cgroup")
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()[-1]
    except (OSError, IndexError):
        return None
    for group in (root / own.rpartition(":")[2].lstrip("/"), root):
        try:
            limit = int((group / "memory.max").read_text(encoding="ascii"))
            used = int((group / "memory.current").read_text(encoding="ascii"))
        except (OSError, ValueError):  # "max": no limit
            continue
        return max(0, limit - used)
    return None
