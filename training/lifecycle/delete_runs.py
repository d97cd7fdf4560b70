"""Delete runs: into the bin, and out of it for ever; and remove what agents have left.

The directory of an agent is ``$LTUI_HOME/nodes/RUN-NODE``, on every machine of a run but the first.
The head receives the logs and records of an agent while it runs. What a node leaves is removed when
the head has everything and the node did not fail. Otherwise it is evidence, and is kept for a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ltui.training.lifecycle.resume_run import wait_for_supervisor_exit
from ltui.training.lifecycle.run_processes import engine_exit, has_live_shim, latest_attempt
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


AGENT_KEEP_S = 14 * 86400.0
"""Seconds for which a directory is kept that the head may not have completely."""
_AGENT_EXIT_S = 3.0
"""Seconds within which the shim exits after the agent."""


def agent_directory(home: Path, run_id: str, node: int) -> RunDir:
    """Return the directory of the agent of ``node``. Creates nothing."""
    return RunDir(home / "nodes" / f"{run_id}-{node}")


def mark_delivered(run_dir: RunDir) -> None:
    """Record that the head has received everything that this agent has recorded."""
    _delivered_path(run_dir).touch()


def _delivered_path(run_dir: RunDir) -> Path:
    return run_dir.path / "engine" / "delivered"


def remove_after_end(run_dir: RunDir) -> bool:
    """Remove the directory of an agent that has just ended. Return False if it must be kept."""
    deadline = time.monotonic() + _AGENT_EXIT_S
    while _is_live_agent(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    if _is_live_agent(run_dir) or not _is_superfluous(run_dir):
        return False
    _remove_agent(run_dir)
    return True


def remove_unneeded_agents(home: Path) -> None:
    """Remove the directories of ended agents that nobody needs any more."""
    for run_dir in ended_agents(home):
        if _is_superfluous(run_dir) or time.time() - _changed_at(run_dir) > AGENT_KEEP_S:
            _remove_agent(run_dir)


def remove_agents_of(run_dir: RunDir) -> None:
    """Remove what agents of a run have left in the home of that run."""
    for left in ended_agents(run_dir.home):
        if left.id.rpartition("-")[0] == run_dir.id:
            _remove_agent(left)


def ended_agents(home: Path) -> Iterator[RunDir]:
    """Yield the directories of agents that do not run on this machine."""
    folder = home / "nodes"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        run_dir = RunDir(path)
        if path.is_dir() and not _is_live_agent(run_dir):
            yield run_dir


def _is_live_agent(run_dir: RunDir) -> bool:
    return lock_holder(run_dir.lock_path) is not None or has_live_shim(run_dir)


def _is_superfluous(run_dir: RunDir) -> bool:
    """Return True if the head has everything, and the engine of this node did not fail."""
    attempt = latest_attempt(run_dir)
    end = None if attempt is None else engine_exit(run_dir, attempt)
    if end is None or end.exit_code != 0 or not _delivered_path(run_dir).exists():
        return False
    # Parts of a checkpoint that travelled to the head begin with a dot, and copies that were read
    # are in `received-N`. Anything else was not copied.
    checkpoints = run_dir.checkpoints_dir
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return all(name.startswith((".", "received-")) for name in names)


def _changed_at(run_dir: RunDir) -> float:
    """Return the unix time of the last change of any file of the directory."""
    newest = 0.0
    for path in (run_dir.path, *run_dir.path.rglob("*")):
        try:
            newest = max(newest, path.lstat().st_mtime)
        except OSError:
            continue
    return newest


def _remove_agent(run_dir: RunDir) -> None:
    """Remove the directory. What cannot be removed is left for the next time."""
    run_dir.remove_stale_socket()
    remove_history(run_dir)
    shutil.rmtree(run_dir.path, ignore_errors=True)
