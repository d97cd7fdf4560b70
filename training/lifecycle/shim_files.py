"""Read the files that the shim writes: its identity, and how the engine ended."""

from __future__ import annotations

import re

from msgspec import Struct

from ltui.training.json_codec import from_json
from ltui.training.process.identity import ProcessIdentity, boot_id, lock_was_copied
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
