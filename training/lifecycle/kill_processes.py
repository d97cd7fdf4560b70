"""Find and kill the remaining processes of a run.

Processes are found by the environment variables with which the run was started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from ltui.training.lifecycle.shim_files import shim_identity
from ltui.training.process.identity import ProcessIdentity, environment, identify, lock_holder, pids
from ltui.training.store.run_directory import RunDir

_WAIT_S = 5.0
"""Seconds to wait for killed processes to exit."""


def run_processes(run_dir: RunDir) -> set[ProcessIdentity]:
    """Return every process that was started for the run, except its supervisor and its shim."""
    excluded = {os.getpid()}
    for mark in (lock_holder(run_dir.lock_path), shim_identity(run_dir)):
        if mark is not None:
            excluded.add(mark.pid)
    processes = set()
    for pid in pids():
        if pid in excluded:
            continue
        variables = environment(pid)
        if variables.get("LTUI_RUN_ID") != run_dir.id:
            continue
        if variables.get("LTUI_RUN_DIR") != str(run_dir.path):
            continue
        mark = identify(pid)
        if mark is not None:
            processes.add(mark)
    return processes


def kill_run_processes(
    run_dir: RunDir, more_processes: Iterable[ProcessIdentity] = ()
) -> list[int]:
    """Kill every process of the run and wait until all have exited. Return the killed pids.

    ``more_processes`` may not have the environment variables of the run.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        remaining = {mark for mark in {*more_processes, *run_processes(run_dir)} if mark.alive()}
        if not remaining:
            break
        for mark in remaining:
            killed.add(mark.pid)
            send_signal(mark, signal.SIGKILL)
        time.sleep(0.05)
    return sorted(killed)


def send_signal(mark: ProcessIdentity, number: int) -> bool:
    """Signal a process unless its pid has been reused. Return True if the signal was sent."""
    if not mark.alive():
        return False
    with contextlib.suppress(OSError):
        os.kill(mark.pid, number)
        return True
    return False


def signal_group(mark: ProcessIdentity, number: int) -> bool:
    """Signal the process group that ``mark`` leads. Return True if the signal was sent."""
    if not mark.alive():
        return False
    with contextlib.suppress(OSError):
        os.killpg(mark.pid, number)
        return True
    return False
