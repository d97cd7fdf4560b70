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
from ltui.training.process.identity import ProcessIdentity, identify, lock_holder
from ltui.training.process.proc_files import environment, pids
from ltui.training.store.run_directory import RunDir

_WAIT_S = 5.0
"""Seconds to wait for killed processes to exit."""


def run_processes(run_dir: RunDir) -> set[ProcessIdentity]:
    """Return every process that was started for the run, except its supervisor and its shim."""
    excluded = {os.getpid()}
    for process in (lock_holder(run_dir.lock_path), shim_identity(run_dir)):
        if process is not None:
            excluded.add(process.pid)
    processes = set()
    for pid in pids():
        if pid in excluded:
            continue
        variables = environment(pid)
        names = (variables.get("LTUI_RUN_ID"), variables.get("LTUI_RUN_DIR"))
        if names == (run_dir.id, str(run_dir.path)) and (process := identify(pid)) is not None:
            processes.add(process)
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
        remaining = {
            process for process in {*more_processes, *run_processes(run_dir)} if process.alive()
        }
        if not remaining:
            break
        for process in remaining:
            killed.add(process.pid)
            send_signal(process, signal.SIGKILL)
        time.sleep(0.05)
    return sorted(killed)


def send_signal(process: ProcessIdentity, number: int, *, group: bool = False) -> bool:
    """Signal a process unless its pid has been reused. Return True if the signal was sent.

    With ``group``, signal the process group that the process leads.
    """
    if not process.alive():
        return False
    with contextlib.suppress(OSError):
        (os.killpg if group else os.kill)(process.pid, number)
        return True
    return False
