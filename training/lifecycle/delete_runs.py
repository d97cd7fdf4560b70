"""Delete runs: into the bin, and out of it for ever."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

from ltui.training.lifecycle.agent_directories import remove_agents_of
from ltui.training.lifecycle.resume_run import wait_for_supervisor_exit
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.find_run import KEEP_S, DeletedRun, bin_folders, deleted_runs, move_to_bin
from ltui.training.store.history_place import remove_history
from ltui.training.store.run_directory import RunDir

CLEAN_S = 1.0
"""Seconds that a command or a supervisor spends on runs that were in the bin for a week."""
_REMOVING = ".removing-"
"""Prefix of the name of a run in the bin of which a part is gone. It cannot be restored."""


def delete(run_dir: RunDir, *, now: bool = False) -> DeletedRun:
    """Move a run to the bin; with ``now``, remove it for ever. Raises ``ProblemError`` if the run
    is live."""
    wait_for_supervisor_exit(run_dir)
    try:
        state = resolve_snapshot(run_dir).state
    except ProblemError:
        # A damaged run, or one of a newer ltui version, can be deleted unless it is running.
        state = RunState.RUNNING if lock_holder(run_dir.lock_path) else RunState.LOST
    if state in LIVE:
        raise ProblemError.of(
            where=run_dir.id, what=f"the run is {state.value}.", remedy="Stop it first."
        )
    if now:
        _linked_directory(run_dir.path, run_dir.home)
    run_dir.remove_stale_socket()
    deleted = move_to_bin(run_dir)
    if now:
        remove(deleted)
    return deleted


def remove(deleted: DeletedRun, limit_s: float = math.inf) -> bool:
    """Remove a run in the bin for ever, with everything that belongs to it elsewhere.

    Return False if ``limit_s`` seconds were not enough: the rest goes with the next call of
    ``empty_bin``. Raises ``ProblemError`` if it cannot be removed.
    """
    deadline = time.monotonic() + limit_s
    linked = _linked_directory(deleted.path, deleted.home)
    try:
        # Renamed first, so that a run of which a part is gone is never restored.
        hidden = deleted.path.with_name(f"{_REMOVING}{deleted.path.name}")
        deleted.path.rename(hidden)
        remove_history(RunDir(hidden))
        if not deleted.restored.path.exists():
            remove_agents_of(deleted.restored)
        return _remove_hidden(hidden, linked, deadline)
    except OSError as error:
        raise ProblemError.of(
            where=str(deleted.path), what=f"it cannot be removed ({error.strerror or error})."
        ) from error


def empty_bin(home: Path, *, limit_s: float = math.inf) -> None:
    """Remove for ever what has been in the bin for a week, as far as the time is enough."""
    deadline = time.monotonic() + limit_s
    for folder in bin_folders(home):
        for hidden in folder.glob(f"{_REMOVING}*"):
            with contextlib.suppress(OSError, ProblemError):
                _remove_hidden(hidden, _linked_directory(hidden, home), deadline)
    for run in deleted_runs(home):
        if time.monotonic() >= deadline:
            return
        if time.time() - run.deleted_at > KEEP_S:
            # What cannot be removed now stays in the bin, which `ltui doctor` names.
            with contextlib.suppress(ProblemError):
                remove(run, deadline - time.monotonic())


def _linked_directory(path: Path, home: Path) -> Path | None:
    """Return the directory to remove with a run directory that is a link; None if there is none.

    Raises ``ProblemError`` if the link leads to anything but the directory of a run.
    """
    if not path.is_symlink():
        return None
    # Relative to the folder of the runs, also for a link in the bin.
    target = Path(os.path.realpath(home / "runs" / os.readlink(path)))
    inside = Path(os.path.realpath(home))
    if target.parent == Path(os.path.realpath(home / "runs")):
        return None  # Another run, which stays.
    above = (inside, *inside.parents, Path.home(), Path.cwd())
    is_run = all((target / name).exists() for name in ("spec.yaml", "engine"))
    reason = None
    if not target.is_dir():
        reason = "which is not there; its disk may not be mounted"
    elif target in above or not is_run:
        reason = "which is no directory of a run"
    elif target.stat().st_uid not in (os.getuid(), path.lstat().st_uid):
        reason = "which belongs to another user"
    if reason is not None:
        raise ProblemError.of(
            where=str(path),
            what=f"it is a link to {target}, {reason}. Nothing was removed.",
            remedy="Remove the link by hand.",
        )
    return target


def _remove_hidden(hidden: Path, linked: Path | None, deadline: float) -> bool:
    if not _remove_tree(linked or hidden, deadline):
        return False
    if hidden.is_symlink():
        hidden.unlink()
    return True


def _remove_tree(folder: Path, deadline: float) -> bool:
    """Remove a folder or file, following no link. Return False if the time was not enough."""
    if folder.is_symlink():
        return True
    if not folder.is_dir():
        # fwalk would open it, and wait for ever for the writer of a pipe.
        folder.unlink()
        return True
    for _, folders, files, handle in os.fwalk(folder, topdown=False, onerror=_raise):
        for name in files:
            os.unlink(name, dir_fd=handle)
            if time.monotonic() >= deadline:
                return False
        for name in folders:
            # Below a folder, fwalk lists links to folders as folders.
            try:
                os.rmdir(name, dir_fd=handle)
            except NotADirectoryError:
                os.unlink(name, dir_fd=handle)
    folder.rmdir()
    return True


def _raise(error: OSError) -> None:
    raise error
