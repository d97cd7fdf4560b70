"""Find the processes of a run and their roles from ``/proc`` only, to check what ltui reports."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ltui.training.process.identity import ProcessIdentity, identify
from ltui.training.process.proc_files import entry_of, environment, pids
from ltui.training.store.run_directory import RunDir


@dataclass(frozen=True)
class RunProcess:
    """One process of a run. ``role``: supervisor, shim, engine, rank 0 ..., worker, other."""

    role: str
    mark: ProcessIdentity

    def alive(self) -> bool:
        return self.mark.alive()


def live_processes(run: RunDir) -> list[RunProcess]:
    """Every process of the run that is alive now."""
    processes = []
    shims = set()
    for pid in pids():
        role = _role(run, pid)
        mark = identify(pid) if role else None
        if role and mark is not None:
            processes.append(RunProcess(role, mark))
            if role == "shim":
                shims.add(pid)
    named = [
        RunProcess("engine", a.mark) if a.role == "other" and _parent(a.mark.pid) in shims else a
        for a in processes
    ]
    return [_with_role_under_torchrun(process) for process in named]


def _with_role_under_torchrun(process: RunProcess) -> RunProcess:
    """Name a rank that torchrun has started, or a worker of its data loader."""
    rank = _rank_variable(process.mark.pid) if process.role == "other" else None
    if rank is None:
        return process
    is_worker = _rank_variable(_parent(process.mark.pid)) is not None
    return RunProcess("worker" if is_worker else f"rank {rank}", process.mark)


def _rank_variable(pid: int) -> str | None:
    return environment(pid).get("RANK")


def _role(run: RunDir, pid: int) -> str | None:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if str(run.path) in argv:
        if "ltui.training.supervise.main" in argv:
            return "supervisor"
        if any(word.endswith("/supervise/shim.py") for word in argv):
            return "shim"
    given = environment(pid)
    if given.get("LTUI_RUN_DIR") != str(run.path):
        return None
    name = _comm(pid)
    if name.startswith("rank-"):
        return f"rank {name[5:]}"
    if any(word.endswith("fake_rank.py") for word in argv):
        return f"rank {given.get('RANK', '?')}"
    return "other"


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    entry = entry_of(pid)
    return entry.parent if entry else 0


def kill_together(processes: Iterable[RunProcess]) -> None:
    """SIGKILL to all, held first so that none sees another go."""
    processes = list(processes)
    for number in (signal.SIGSTOP, signal.SIGKILL) if len(processes) > 1 else (signal.SIGKILL,):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.mark.pid, number)
    while any(process.alive() for process in processes):
        time.sleep(0.002)


def listening_ports(processes: Iterable[RunProcess]) -> set[int]:
    """TCP ports at which these processes listen."""
    inodes = set()
    for process in processes:
        folder = f"/proc/{process.mark.pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"{folder}/{name}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    return {port for inode, port in _listeners() if inode in inodes}


def open_ports() -> set[int]:
    return {port for _, port in _listeners()}


def _listeners() -> list[tuple[str, int]]:
    listeners = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    listeners.append((fields[9], int(fields[1].rpartition(":")[2], 16)))
    return listeners
