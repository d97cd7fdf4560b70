"""Write the batch script of a run into a new run directory, and submit it."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from ltui.app.exit_codes import EXIT_DONE
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import create_run_directory, leaving_no_run
from ltui.training.lifecycle.record_code import record_code
from ltui.training.lifecycle.resume_run import check_resumable
from ltui.training.lifecycle.run_status import nan_step
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import BatchScript, JobOptions
from ltui.training.slurm.job_record import (
    JobRecord,
    read_record,
    script_path,
    write_resubmitted,
    write_submission,
)
from ltui.training.slurm.slurm_client import SlurmError, installed, require_sbatch, submit
from ltui.training.store.code_record import SUBMITTED
from ltui.training.store.run_checkpoints import choose_checkpoint
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
) -> tuple[RunDir, str]:
    """Submit a run. Return its directory and the number of its job.

    ``private_files`` (name -> text) are written into the run directory.
    Raises ``ProblemError`` if SLURM rejects it; then there is no run directory.
    """
    require_sbatch()
    run_dir = RunDir(home / "runs" / spec.id)
    record = JobRecord(token=secrets.token_hex(8), submitted_at=time.time(), options=options)
    with leaving_no_run(run_dir):
        create_run_directory(run_dir, spec, private_files)
        write_submission(run_dir, record)
        script = batch_script(spec, home, options, record.token)
        write_atomically(script_path(run_dir), script.text().encode())
    try:
        job_id = submit(script_path(run_dir), spec.cwd)
    except BaseException as error:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        if isinstance(error, SlurmError):
            raise _rejected(error, "ltui submit") from error
        raise
    write_submission(run_dir, replace(record, first_job_id=job_id))
    record_code(run_dir, spec, SUBMITTED)
    return run_dir, job_id


def is_submitted(run_dir: RunDir) -> bool:
    """Return True if SLURM starts this run, and this machine can submit jobs."""
    return read_record(run_dir) is not None and "SLURM_JOB_ID" not in os.environ and installed()


def resubmit_run(run_dir: RunDir, spec: RunSpec | None) -> int:
    """Submit another job for a run that has ended, and return the exit code of the command.

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
    print(f"{run_dir.id} is queued in SLURM as job {job_id}.")
    return EXIT_DONE


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
