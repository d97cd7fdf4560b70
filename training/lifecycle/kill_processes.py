"""Ending whatever is left of a run, found by what it was started with."""

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


def run_processes(run_dir: RunDir) -> set[ProcessIdentity]:
    """Every process that was started for the run, but its supervisor and its keeper."""
    spared = {os.getpid()}
    for mark in (lock_holder(run_dir.lock_path), shim_identity(run_dir)):
        if mark is not None:
            spared.add(mark.pid)
    found = set()
    for pid in pids():
        if pid in spared:
            continue
        given = environment(pid)
        if given.get("LTUI_RUN_ID") != run_dir.id:
            continue
        if given.get("LTUI_RUN_DIR") != str(run_dir.path):
            continue
        mark = identify(pid)
        if mark is not None:
            found.add(mark)
    return found


def kill_run_processes(run_dir: RunDir, known: Iterable[ProcessIdentity] = ()) -> list[int]:
    """Kill every process of the run and wait until it is gone; the pids that had to go."""
    killed: set[int] = set()
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        left = {mark for mark in {*known, *run_processes(run_dir)} if mark.alive()}
        if not left:
            break
        for mark in left:
            killed.add(mark.pid)
            send_signal(mark, signal.SIGKILL)
        time.sleep(0.05)
    return sorted(killed)


def send_signal(mark: ProcessIdentity, number: int) -> bool:
    """Signal a process, if it still is the one that is meant."""
    if not mark.alive():
        return False
    with contextlib.suppress(OSError):
        os.kill(mark.pid, number)
        return True
    return False


def signal_group(mark: ProcessIdentity, number: int) -> bool:
    """Signal the process group that ``mark`` leads."""
    if not mark.alive():
        return False
    with contextlib.suppress(OSError):
        os.killpg(mark.pid, number)
        return True
    return False
