"""The end of a job: requeue it, or submit another one, if the run has to continue."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from msgspec.structs import replace

from ltui.app.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from ltui.training.slurm.job_record import (
    JobRecord,
    Life,
    read_record,
    refusal,
    script_path,
    with_unfinished_closed,
    write_lives,
)
from ltui.training.slurm.slurm_client import SlurmError, job_properties, requeue, submit
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_checkpoints import furthest_checkpoint
from ltui.training.store.run_directory import RunDir

_EXIT_CODES = {RunState.FINISHED.value: EXIT_DONE, RunState.STOPPED.value: EXIT_STOPPED}


def continue_run(run_dir: RunDir, code: int) -> int:
    """Continue the run if its last life asked for it. Return the exit code of the job.

    ``code`` is the exit code of srun. If the job is requeued, SLURM ends this process.
    """
    record = read_record(run_dir)
    if record is None or record.last_life is None:
        return code or EXIT_FAILED
    last = record.last_life
    job_id = os.environ.get("SLURM_JOB_ID", last.job_id)
    if record.next_job_id is not None or last.job_id != job_id:
        # Somebody has resumed the run since this job stopped it: another job has it now.
        outcomes = [life.outcome for life in record.lives if life.job_id == job_id]
        return _EXIT_CODES.get(outcomes[-1] or "", EXIT_FAILED) if outcomes else EXIT_FAILED
    if last.ended_at is None:
        # The process on the first node was killed. The next ltui command records the run's end.
        checkpoint = furthest_checkpoint(run_dir.checkpoints_dir)
        step = None if checkpoint is None else checkpoint.global_step
        lives = with_unfinished_closed(record.lives, step, time.time())
        write_lives(run_dir, lives, counted_from=record.counted_from)
        return code or EXIT_FAILED
    if last.requeued:
        _continue(run_dir, record)
    return _EXIT_CODES.get(last.outcome or "", EXIT_FAILED)


def _continue(run_dir: RunDir, record: JobRecord) -> None:
    """Requeue the job or submit a following one. The record says why if neither is done."""
    assert record.last_life is not None
    job_id = record.last_life.job_id
    why = refusal(record.counted_lives)
    if why is None and record.private:
        why = (
            f"the checkpoints are in {run_dir.path} on {record.last_life.host}, which the next "
            "start may not see; set LTUI_HOME to a shared folder"
        )
    if why is None:
        why = _requeue_or_chain(run_dir, record, job_id)
    if why is not None:
        lives = (*record.lives[:-1], replace(record.last_life, requeued=False))
        write_lives(run_dir, lives, counted_from=record.counted_from, note=f"not requeued: {why}")
        print(f"ltui: {run_dir.id} is not requeued: {why}.", file=sys.stderr, flush=True)


def _requeue_or_chain(run_dir: RunDir, record: JobRecord, job_id: str) -> str | None:
    """Return why the run could not be continued, or None."""
    assert record.last_life is not None
    if requeued_by_slurm(record.last_life):
        return None
    if record.cancelled_at is not None or _is_being_cancelled(job_id):
        return f"job {job_id} was cancelled"
    print(f"ltui: {run_dir.id} continues in the next start of its job.", flush=True)
    reasons = []
    steps: tuple[Callable[[], None], ...] = (
        lambda: requeue(job_id),
        lambda: _chain(run_dir, record, job_id),
    )
    for step in steps:
        try:
            step()
        except SlurmError as error:
            reasons.append(str(error))
        else:
            return None
    return "; ".join(reasons)


def requeued_by_slurm(life: Life) -> bool:
    """Return True if SLURM has already put the job of ``life`` back into the queue.

    It does so when it preempts a job or when a node fails, and then ends the processes of the job.
    """
    try:
        restarts = job_properties(life.job_id).get("Restarts", "")
    except SlurmError:
        return False
    return restarts.isdecimal() and int(restarts) > life.restart


def _is_being_cancelled(job_id: str) -> bool:
    """Return True if someone has cancelled the job while this process ends it.

    SLURM would requeue it all the same. A job that comes to its time limit has a reason.
    """
    try:
        properties = job_properties(job_id)
    except SlurmError:
        return False
    return properties.get("JobState") in ("COMPLETING", "CANCELLED") and (
        properties.get("Reason") == "None"
    )


def _chain(run_dir: RunDir, record: JobRecord, job_id: str) -> None:
    """Submit a job that starts when this one has ended."""
    spec = run_dir.read_spec()
    options = (f"--dependency=afterany:{job_id}",)
    next_job_id = submit(script_path(run_dir), spec.cwd, options)
    write_lives(run_dir, record.lives, counted_from=record.counted_from, next_job_id=next_job_id)
