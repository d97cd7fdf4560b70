"""Properties of the processes on a GPU: user, name and run id.

In a container, the driver may list processes by the host's pids, which may be those of other
processes here. A process that uses a GPU has opened a device file of the driver.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

from ltui.training.gpu.reading import GpuProcess
from ltui.training.process.proc_files import entry_of, environment, open_files

DRIVER = Path("/proc/driver/nvidia")
"""Exists where the driver has device files: on Linux, but not in WSL."""
DEVICE_FILES = "/dev/nvidia"


class ProcessInfoCache:
    """Reads the properties of processes and caches them while the process is the same."""

    def __init__(self) -> None:
        self._cache: dict[int, GpuProcess] = {}

    def describe(
        self, pid: int, memory_bytes: int | None, *, graphics: bool, gpu_instance: int | None
    ) -> GpuProcess:
        """Return the process ``pid`` of a GPU with its properties."""
        return replace(
            self._read(pid),
            memory_bytes=memory_bytes,
            graphics=graphics,
            gpu_instance=gpu_instance,
        )

    def retain_only(self, pids: set[int]) -> None:
        """Remove all processes from the cache except ``pids``."""
        for pid in self._cache.keys() - pids:
            del self._cache[pid]

    def _read(self, pid: int) -> GpuProcess:
        entry = entry_of(pid)
        if entry is None:
            return GpuProcess(pid=pid, visible=False)
        process = self._cache.get(pid)
        if process is None or process.start_ticks != entry.start_ticks:
            process = self._cache[pid] = (
                GpuProcess(
                    pid=pid,
                    start_ticks=entry.start_ticks,
                    user=_user(pid),
                    name=entry.name or None,
                    run_id=environment(pid).get("LTUI_RUN_ID"),
                )
                if _may_use_gpu(pid)
                else GpuProcess(pid=pid, start_ticks=entry.start_ticks, visible=False)
            )
        return process


def _may_use_gpu(pid: int) -> bool:
    """Return False if the process certainly is not the one that the driver means."""
    files = open_files(pid)  # empty for a process of another user
    return not files or not DRIVER.exists() or any(f.startswith(DEVICE_FILES) for f in files)


def _user(pid: int) -> str | None:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
