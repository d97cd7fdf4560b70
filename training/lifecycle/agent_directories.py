"""Directories of agents: ``$LTUI_HOME/nodes/RUN-NODE``, on every machine of a run but the first.

The head receives the logs and records of an agent while it runs. What a node leaves is removed when
the head has everything and the node did not fail. Otherwise it is evidence, and is kept for a time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ltui.training.lifecycle.run_processes import engine_exit, has_live_shim, latest_attempt
from ltui.training.process.identity import lock_holder
from ltui.training.store.history_place import remove_history
from ltui.training.store.run_directory import RunDir

KEEP_S = 14 * 86400.0
"""Seconds for which a directory is kept that the head may not have completely."""
_EXIT_S = 3.0
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
    deadline = time.monotonic() + _EXIT_S
    while _is_live(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    if _is_live(run_dir) or not _is_superfluous(run_dir):
        return False
    _remove(run_dir)
    return True


def remove_unneeded_agents(home: Path) -> None:
    """Remove the directories of ended agents that nobody needs any more."""
    for run_dir in ended_agents(home):
        if _is_superfluous(run_dir) or time.time() - _changed_at(run_dir) > KEEP_S:
            _remove(run_dir)


def remove_agents_of(run_dir: RunDir) -> None:
    """Remove what agents of a run have left in the home of that run."""
    for left in ended_agents(run_dir.home):
        if left.id.rpartition("-")[0] == run_dir.id:
            _remove(left)


def ended_agents(home: Path) -> Iterator[RunDir]:
    """Yield the directories of agents that do not run on this machine."""
    folder = home / "nodes"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        run_dir = RunDir(path)
        if path.is_dir() and not _is_live(run_dir):
            yield run_dir


def _is_live(run_dir: RunDir) -> bool:
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


def _remove(run_dir: RunDir) -> None:
    """Remove the directory. What cannot be removed is left for the next time."""
    run_dir.remove_stale_socket()
    remove_history(run_dir)
    shutil.rmtree(run_dir.path, ignore_errors=True)
