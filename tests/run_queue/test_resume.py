"""Another attempt of a run from the run queue: from its last checkpoint, with changes, or not."""

from __future__ import annotations

import pytest

from ltui.training.lifecycle.run_queue import enqueue_resume, take_out
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_queue import QueueEntry
from ltui.training.state.run_snapshot import RunState
from tests.run_queue.queued_programs import Programs
from tests.supervise.conftest import Runs, runs
from tests.waiting import wait_for

__all__ = ["runs"]


def test_queued_resume_is_the_next_attempt_and_can_be_taken_out(
    runs: Runs, programs: Programs
) -> None:
    run = runs.training("--save-every", "5", step=12)
    with pytest.raises(ProblemError, match="cannot be resumed"):
        enqueue_resume(run, QueueEntry())
    before = runs.end(run, "stop")
    assert before.state is RunState.STOPPED
    enqueue_resume(run, QueueEntry(held=True))
    queued = resolve_snapshot(run)
    assert (queued.state, queued.attempt) == (RunState.QUEUED, 1)
    assert queued.global_step == before.global_step
    take_out(run)
    after = resolve_snapshot(run)
    assert (after.state, after.detail) == (before.state, before.detail)
    assert after.ended_at == before.ended_at
    spec = run.read_spec().with_changes(restarts=3, slots=1)
    enqueue_resume(run, QueueEntry(), spec=spec)
    wait_for(lambda: resolve_snapshot(run).attempt, wanted=lambda attempt: attempt == 2)
    resumed = runs.more_steps(run, 5)
    assert (resumed.global_step or 0) > (before.global_step or 0)
    assert run.read_spec().restarts == 3
    wait_for(lambda: not run.queued_path.exists())
    assert not run.queued_spec_path.exists()
    runs.end(run, "stop")
