"""Who the processes on a GPU are, from /proc: user, name, and the run they say they belong to."""

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
    start_ticks: int
    user: str | None
    name: str | None
    run_id: str | None


class ProcessInfoCache:
    """Looks processes up, and remembers those that are still the same."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._known: dict[int, ProcessInfo] = {}
        self._users: dict[int, str] = {}

    def describe(
        self, pid: int, memory_bytes: int | None, *, graphics: bool, gpu_instance: int | None
    ) -> GpuProcess:
        identity = self._identity(pid)
        if identity is None:
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
            start_ticks=identity.start_ticks,
            user=identity.user,
            name=identity.name,
            run_id=identity.run_id,
            gpu_instance=gpu_instance,
        )

    def retain_only(self, pids: set[int]) -> None:
        for pid in self._known.keys() - pids:
            del self._known[pid]

    def _identity(self, pid: int) -> ProcessInfo | None:
        folder = self._proc / str(pid)
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:
            return None
        # The name stands in brackets and may hold anything; the fields after it are fixed.
        name, _, rest = stat.partition("(")[2].rpartition(")")
        start_ticks = int(rest.split()[19])
        known = self._known.get(pid)
        if known is None or known.start_ticks != start_ticks:
            known = ProcessInfo(start_ticks, self._user(folder), name or None, _run_id(folder))
            self._known[pid] = known
        return known

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
