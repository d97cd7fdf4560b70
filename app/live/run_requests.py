"""Send requests to a run's supervisor, and wait until they have taken effect.

If the supervisor died and the ranks are alive, a new supervisor is started first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ltui.app.state_words import ended_sentence
from ltui.training.lifecycle.run_status import current_snapshot, resolve_snapshot
from ltui.training.lifecycle.supervisor_client import (
    ControlClient,
    NotSupervisedError,
    restart_supervisor,
)
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.good_checkpoints import is_resumable
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir

POLL_INTERVAL_S = 0.1
"""Seconds between two reads of a run's state while waiting."""
ANSWER_TIMEOUT_S = 5.0
"""Seconds to wait for an answer. Usually it comes at once; on a loaded machine it may take a
while."""


def send_request(
    run_dir: RunDir, request: dict[str, Any], timeout_s: float = ANSWER_TIMEOUT_S
) -> dict[str, Any]:
    """Return the supervisor's answer to a request.

    Raises ``ProblemError`` if the supervisor refuses the request or the run is not alive.
    """
    if run_dir.slurm_dir.is_dir():
        # Imported here: few runs have a job of SLURM.
        from ltui.training.lifecycle.job_control import request_from_job

        if (answer := request_from_job(run_dir, request)) is not None:
            return answer
    if run_dir.queued_path.exists():
        # Imported here: few runs are queued.
        from ltui.training.lifecycle.run_queue import request_from_queue

        if (answer := request_from_queue(run_dir, request)) is not None:
            return answer
    client = ControlClient(run_dir)
    try:
        return client.request(request, timeout_s)
    except NotSupervisedError:
        require_live(run_dir)
        restart_supervisor(run_dir)
        return client.request(request, timeout_s)


def require_live(run_dir: RunDir) -> RunSnapshot:
    """Return the current snapshot of a live run. Raises ``ProblemError`` if the run has ended."""
    snapshot = current_snapshot(run_dir)
    if snapshot.state not in LIVE:
        remedy = None
        if snapshot.state is not RunState.FINISHED and is_resumable(snapshot):
            remedy = f"To resume: ltui resume {run_dir.id}"
        elif snapshot.state is not RunState.FINISHED:
            remedy = "It saved no good checkpoint, so it cannot be resumed."
        message = f"it is not running ({ended_sentence(snapshot)})."
        raise ProblemError(Problem(run_dir.id, message, remedy, code="not-running"))
    return snapshot


def wait_until(
    run_dir: RunDir, is_done: Callable[[RunSnapshot], bool], timeout_s: float
) -> tuple[RunSnapshot, bool]:
    """Wait until ``is_done`` is true, the run ends or the timeout passes.

    Returns the last snapshot and the last result of ``is_done``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        snapshot = resolve_snapshot(run_dir)
        result = is_done(snapshot)
        if result or snapshot.state not in LIVE or time.monotonic() >= deadline:
            return snapshot, result
        time.sleep(POLL_INTERVAL_S)
