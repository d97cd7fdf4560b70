"""Identity of the processes on a GPU, read from /proc: user, name and run id."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from ltui.training.gpu.reading import GpuProcess

PROC = Path("/proc")
RUN_ID = b"LTUI_RUN_ID="


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Properties of a process, read from /proc."""

    start_ticks: int
    user: str | None
    name: str | None
    run_id: str | None


class ProcessInfoCache:
    """Reads the properties of processes and caches them while the process is the same."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._cache: dict[int, ProcessInfo] = {}
        self._users: dict[int, str] = {}

    def describe(
        self, pid: int, memory_bytes: int | None, *, graphics: bool, gpu_instance: int | None
    ) -> GpuProcess:
        """Return the process ``pid`` of a GPU with its properties."""
        info = self._read_info(pid)
        if info is None:
            return GpuProcess(
                pid=pid,
                memory_bytes=memory_bytes,
                graphics=graphics,
                visible=False,
                gpu_instance=gpu_instance,
            )
        return GpuProcess(
            pid=pid,
            memory_bytes=memory_bytes,
            graphics=graphics,
            start_ticks=info.start_ticks,
            user=info.user,
            name=info.name,
            run_id=info.run_id,
            gpu_instance=gpu_instance,
        )

    def retain_only(self, pids: set[int]) -> None:
        """Remove all processes from the cache except ``pids``."""
        for pid in self._cache.keys() - pids:
            del self._cache[pid]

    def _read_info(self, pid: int) -> ProcessInfo | None:
        folder = self._proc / str(pid)
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:
            return None
        # The name is in parentheses and may contain anything; the fields after it are fixed.
        name, _, fields = stat.partition("(")[2].rpartition(")")
        start_ticks = int(fields.split()[19])
        info = self._cache.get(pid)
        if info is None or info.start_ticks != start_ticks:
            info = ProcessInfo(start_ticks, self._user(folder), name or None, _run_id(folder))
            self._cache[pid] = info
        return info

    def _user(self, folder: Path) -> str | None:
        try:
            uid = os.stat(folder).st_uid
        except OSError:
            return None
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]


def _run_id(folder: Path) -> str | None:
    try:
        environment = (folder / "environ").read_bytes()
    except OSError:
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(RUN_ID):
            return entry[len(RUN_ID) :].decode(errors="replace")
    return None
