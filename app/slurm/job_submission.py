"""The jobs of a run: submit the first, submit another, and continue the run at the end of a job.

A job is requeued at its end, or another one is submitted, if the run has to continue.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import create_run_directory, leaving_no_run
from ltui.training.lifecycle.record_code import record_code
from ltui.training.lifecycle.resume_run import check_resumable
from ltui.training.lifecycle.run_status import nan_step, resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import BatchScript, JobOptions
from ltui.training.slurm.job_record import (
    JobRecord,
    Life,
    read_record,
    refusal,
    script_path,
    with_unfinished_closed,
    write_lives,
    write_resubmitted,
    write_submission,
)
from ltui.training.slurm.slurm_client import (
    SlurmError,
    installed,
    job_properties,
    requeue,
    require_sbatch,
    submit,
)
from ltui.training.state.run_queue import NEVER, dependency_reason, split_dependency
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.code_record import SUBMITTED
from ltui.training.store.run_checkpoints import choose_checkpoint, furthest_checkpoint
from ltui.training.store.run_directory import RunDir, write_atomically
from ltui.training.store.spec_file import spec_text


def batch_script(spec: RunSpec, home: Path, options: JobOptions, token: str) -> BatchScript:
    """Return the batch script of a run."""
    run_dir = RunDir(home / "runs" / spec.id)
    return BatchScript(
        run_id=spec.id,
        token=token,
        spec_text=spec_text(spec),
        python=sys.executable,
        home=str(home),
        cwd=spec.cwd,
        output=_output(run_dir, spec.cwd),
        options=options,
    )


def submit_run(
    spec: RunSpec,
    home: Path,
    options: JobOptions,
    private_files: Mapping[str, str] | None = None,
    after: Sequence[str] = (),
) -> tuple[RunDir, str]:
    """Submit a run. Return its directory and the number of its job.

    ``private_files`` (name -> text) are written into the run directory. The job waits for those of
    the runs ``after``: ``ID``, or ``ID:ok`` for one that must finish.
    Raises ``ProblemError`` if SLURM rejects it; then there is no run directory.
    """
    require_sbatch()
    waits = _dependency_option(home, after)
    run_dir = RunDir(home / "runs" / spec.id)
    record = JobRecord(token=secrets.token_hex(8), submitted_at=time.time(), options=options)
    with leaving_no_run(run_dir):
        create_run_directory(run_dir, spec, private_files)
        write_submission(run_dir, record)
        script = batch_script(spec, home, options, record.token)
        write_atomically(script_path(run_dir), script.text().encode())
    try:
        job_id = submit(script_path(run_dir), spec.cwd, waits)
    except BaseException as error:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        if isinstance(error, SlurmError):
            raise _rejected(error, "ltui submit") from error
        raise
    write_submission(run_dir, replace(record, first_job_id=job_id))
    record_code(run_dir, spec, SUBMITTED)
    return run_dir, job_id


def _dependency_option(home: Path, after: Sequence[str]) -> tuple[str, ...]:
    """Return the option of sbatch that waits for the jobs of other runs; none for what is met.

    Raises ``ProblemError`` if a run has no job, or cannot end as it must any more.
    """
    conditions = []
    for text in after:
        run, must_finish = split_dependency(text)
        run_dir = RunDir(home / "runs" / run)
        record = read_record(run_dir)
        if record is None or record.job_id is None:
            raise ProblemError.of(
                where=f"--after {text}",
                what="this run has no job, so SLURM cannot wait for it.",
                remedy="Name a run of `ltui submit`.",
            )
        reason = dependency_reason(text, {run: resolve_snapshot(run_dir).state.value})
        if reason is not None and reason.startswith(NEVER):
            raise ProblemError.of(where=f"--after {text}", what=f"the run {reason}.")
        if reason is not None:
            conditions.append(f"after{'ok' if must_finish else 'any'}:{record.job_id}")
    return (f"--dependency={','.join(conditions)}",) if conditions else ()


def is_submitted(run_dir: RunDir) -> bool:
    """Return True if SLURM starts this run, and this machine can submit jobs."""
    return read_record(run_dir) is not None and "SLURM_JOB_ID" not in os.environ and installed()


def resubmit_run(run_dir: RunDir, spec: RunSpec | None) -> str:
    """Submit another job for a run that has ended, and return its number.

    ``spec`` replaces the stored specification. Raises ``ProblemError`` if the run is live or has no
    checkpoint, or if SLURM rejects the job; then the run is as before.
    """
    record = read_record(run_dir)
    assert record is not None
    check_resumable(run_dir, allow_finished=spec is not None)
    choice = choose_checkpoint(run_dir.checkpoints_dir, nan_step(run_dir))
    if choice.taken is None and not record.private:
        raise ProblemError.of(
            where=run_dir.id,
            what=f"there is nothing to resume from: {choice.why_none()}.",
            remedy="Submit it again as a new run.",
        )
    before, new = run_dir.read_spec(), spec or run_dir.read_spec()
    script = batch_script(new, run_dir.home, record.options, record.token).text()
    run_dir.write_spec(new)
    write_atomically(script_path(run_dir), script.encode())
    try:
        job_id = submit(script_path(run_dir), new.cwd)
    except SlurmError as error:
        run_dir.write_spec(before)
        raise _rejected(error, "ltui resume") from error
    write_resubmitted(run_dir, record, job_id)
    return job_id


def _rejected(error: SlurmError, where: str) -> ProblemError:
    return ProblemError.of(
        where=where,
        what=f"SLURM did not accept the job ({error}).",
        remedy="Correct the option that it names, or try again when its controller answers.",
    )


def _output(run_dir: RunDir, cwd: str) -> str:
    """Return the file of the job's output.

    The nodes see the working directory, so they see the run directory if it is on the same file
    system. A relative path is safe otherwise, because SLURM could not open a missing folder.
    """
    try:
        shared = os.stat(run_dir.home).st_dev == os.stat(cwd).st_dev
    except OSError:
        shared = False
    return str(run_dir.slurm_dir / "job-%j.log") if shared else f"{run_dir.id}-%j.log"


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
        write_lives(run_dir, record.with_lives(lives))
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
        write_lives(run_dir, record.with_lives(lives, note=f"not requeued: {why}"))
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
    write_lives(run_dir, record.with_lives(record.lives, next_job_id=next_job_id))
