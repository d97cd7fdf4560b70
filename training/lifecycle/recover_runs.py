"""Recover abandoned runs: runs whose supervisor and shim are both dead.

This happens when ranks of the user's own launcher outlive both processes, when a supervisor dies
before it has started a shim (a run that waits for GPUs), and after a reboot. In each case the lock
file still names the dead supervisor. The next ltui command starts another supervisor, which
continues to wait, or kills the remaining processes and records the end of the run.
"""

from __future__ import annotations

import time

from ltui.training.lifecycle.kill_processes import kill_run_processes
from ltui.training.lifecycle.run_status import is_abandoned, resolve_snapshot
from ltui.training.lifecycle.shim_files import shim_identity
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir

_RECORDED_S = 10.0
"""Seconds to wait until the new supervisor has recorded the end of the run."""


def current_snapshot(run: RunDir) -> RunSnapshot:
    """Recover the run first if it is abandoned, then return ``resolve_snapshot``."""
    recover_run(run)
    return resolve_snapshot(run)


def recover_run(run: RunDir, timeout_s: float = _RECORDED_S) -> bool:
    """Recover the run if it is abandoned, and return True if it was.

    Returns when the run waits in the queue again, has left it, or its end is recorded. It raises no
    errors: a run that cannot be recovered, for example on a read-only disk, is shown as it is.
    """
    if not is_abandoned(run):
        return False
    # Imported here: few runs are abandoned, and every command that shows a run asks.
    from ltui.training.lifecycle.start_supervisor import restart_supervisor

    try:
        restart_supervisor(run)
    except (ProblemError, OSError):
        # No supervisor can be started, so do not leave the run's processes running.
        if lock_holder(run.lock_path) is None:
            kill_run_processes(run)
    deadline = time.monotonic() + timeout_s
    while lock_holder(run.lock_path) is not None and time.monotonic() < deadline:
        if stays_live(run):
            break
        time.sleep(0.02)
    return True


def stays_live(run_dir: RunDir) -> bool:
    """Return True if the run continues: its supervisor is not only recording the end."""
    snapshot = resolve_snapshot(run_dir)
    if snapshot.state not in LIVE:
        return False
    shim = shim_identity(run_dir)
    return snapshot.state is RunState.QUEUED or (shim is not None and shim.alive())
