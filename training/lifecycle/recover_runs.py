"""Taking up runs that lost both supervisor and keeper: nobody is left to end or record them.

Ranks of a foreign launcher may outlive both; a run that waited for GPUs had no keeper yet; after a
reboot nothing is left at all. In each case the lock file still names the supervisor that died, and
whoever uses ltui next starts another: it goes on waiting, or ends what is left and records the end.
"""

from __future__ import annotations

import time
from pathlib import Path

from ltui.training.lifecycle.kill_processes import kill_run_processes
from ltui.training.lifecycle.run_status import is_abandoned, resolve_snapshot
from ltui.training.lifecycle.start_supervisor import adopt
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir, list_runs

_RECORDED_S = 10.0


def recover_abandoned_runs(home: Path) -> list[RunDir]:
    """Start a supervisor for every abandoned run of ``home``; those that were found.

    Costs one small file a run where none is abandoned. Raises nothing: what can't be taken up, on
    a disk that can't be written say, is shown as it is.
    """
    return [run for run in list_runs(home) if recover_run(run)]


def current_snapshot(run: RunDir) -> RunSnapshot:
    """Recover the run first if it is abandoned, then return ``resolve_snapshot``."""
    recover_run(run)
    return resolve_snapshot(run)


def recover_run(run: RunDir) -> bool:
    """Recover the run if it is abandoned, and return True if it was.

    Returns when the run waits in the queue again or its end is recorded.
    """
    if not is_abandoned(run):
        return False
    try:
        adopt(run)
    except (ProblemError, OSError):
        # No supervisor can be had: no reason to leave its processes running.
        if lock_holder(run.lock_path) is None:
            kill_run_processes(run)
        return True
    deadline = time.monotonic() + _RECORDED_S
    while lock_holder(run.lock_path) is not None and time.monotonic() < deadline:
        if resolve_snapshot(run).state is RunState.QUEUED:
            break
        time.sleep(0.02)
    return True
