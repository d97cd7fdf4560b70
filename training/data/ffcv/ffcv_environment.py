"""What FFCV finds on this machine: whether it is installed, and the cores, threads and memory.

Linux only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch


def has_ffcv() -> bool:
    """Return True if FFCV is installed, without importing it."""
    return find_spec("ffcv") is not None


def uses_ffcv(loader: str) -> bool:
    """Return True if ``loader`` selects FFCV: ``ffcv``, or ``auto`` if it is installed."""
    if loader == "ffcv" and not has_ffcv():
        raise ValueError("FFCV is not installed: use loader=torch, or pip install ffcv")
    return loader != "torch" and has_ffcv()


def cores_per_rank() -> int:
    """Return the allowed cores of this process per rank of the machine; at least 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@contextmanager
def keep_torch_threads() -> Iterator[None]:
    """Restore torch's number of threads at the end: FFCV and numba change it."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def available_bytes() -> int | None:
    """Return the available memory of the machine or the control group, whichever is less.

    Return None if neither is known.
    """
    limits = [n for n in (_machine_available(), _cgroup_available()) if n is not None]
    return min(limits) if limits else None


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _cgroup_available() -> int | None:
    """Return the memory left in this process's control group.

    In a container, the limit is set at the root.
    """
    root = Path("/sys/fs/cgroup")
    try:
        entry = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()[-1]
    except (OSError, IndexError):
        return None
    for group in (root / entry.rpartition(":")[2].lstrip("/"), root):
        try:
            limit = int((group / "memory.max").read_text(encoding="ascii"))
            used = int((group / "memory.current").read_text(encoding="ascii"))
        except (OSError, ValueError):  # "max": no limit
            continue
        return max(0, limit - used)
    return None
