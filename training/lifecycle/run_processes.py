"""The processes of a run: shim and engine by the shim's files, all others by their environment.

The files of the shim also say how the engine ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable

from msgspec import Struct

from ltui.training.json_codec import from_json
from ltui.training.process.identity import (
    ProcessIdentity,
    boot_id,
    identify,
    lock_holder,
    lock_was_copied,
)
from ltui.training.process.proc_files import environment, pids
from ltui.training.store.run_directory import RunDir, read_json


class EngineExit(Struct, frozen=True, kw_only=True):
    """How an engine ended."""

    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    """The reason if the engine could not be started."""
    ended_at: float | None = None
    killed: tuple[int, ...] = ()
    """Processes that the engine left running and that the shim terminated."""


def engine_exit(run_dir: RunDir, attempt: int) -> EngineExit | None:
    """Return how the engine ended, or None if it is running or if its end was not observed."""
    document = read_json(run_dir.engine_exit_path(attempt))
    try:
        return None if document is None else from_json(EngineExit, document, tolerant=True)
    except ValueError:
        return None


def shim_identity(run_dir: RunDir, attempt: int | None = None) -> ProcessIdentity | None:
    """Return the process of the shim, or None if it belongs to an earlier boot or another run.

    With ``attempt``, return None if the shim belongs to another attempt.
    """
    return _process_identity(run_dir, attempt, "pid", "start_ticks")


def has_live_shim(run_dir: RunDir) -> bool:
    """Return True if the shim of the run's last attempt runs."""
    shim = shim_identity(run_dir)
    return shim is not None and shim.alive()


def engine_identity(run_dir: RunDir, attempt: int | None = None) -> ProcessIdentity | None:
    """Return the process of the engine, under the same conditions as ``shim_identity``."""
    return _process_identity(run_dir, attempt, "engine_pid", "engine_start_ticks")


def from_earlier_boot(run_dir: RunDir) -> bool:
    """Return True if the shim was started before the last reboot, so no process of it exists."""
    document = read_json(run_dir.shim_path)
    return document is not None and document.get("boot_id") not in (None, boot_id())


def latest_attempt(run_dir: RunDir) -> int | None:
    """Return the number of the attempt that was started last, or None if there is none."""
    try:
        names = [path.name for path in (run_dir.path / "engine").iterdir()]
    except OSError:
        return None
    matches = [re.fullmatch(r"(\d+)\.start\.json", name) for name in names]
    return max((int(match[1]) for match in matches if match), default=None)


def _process_identity(
    run_dir: RunDir, attempt: int | None, pid: str, ticks: str
) -> ProcessIdentity | None:
    document = read_json(run_dir.shim_path)
    if document is None:
        return None
    process = ProcessIdentity(document.get(pid) or 0, document.get(ticks) or 0)
    if type(process.pid) is not int or type(process.start_ticks) is not int:
        return None
    # Without a start time, every process with this pid would count.
    if process.pid <= 0 or process.start_ticks <= 0 or document.get("boot_id") != boot_id():
        return None
    if attempt is not None and document.get("attempt") != attempt:
        return None
    return None if lock_was_copied(run_dir.lock_path) else process


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


def send_signal(process: ProcessIdentity, number: int, *, group: bool = False) -> None:
    """Signal a process unless its pid has been reused.

    With ``group``, signal the process group that the process leads.
    """
    if process.alive():
        with contextlib.suppress(OSError):
            (os.killpg if group else os.kill)(process.pid, number)
