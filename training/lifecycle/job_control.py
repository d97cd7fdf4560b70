"""Carry out requests for a run that waits in SLURM's queue or runs on another machine."""

from __future__ import annotations

import json
from typing import Any

from ltui.training.config.defaults import STOP_TIMEOUT_S
from ltui.training.lifecycle.job_snapshot import job_place
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import WARNING_SIGNAL
from ltui.training.slurm.job_record import JobRecord, read_record, write_cancelled
from ltui.training.slurm.run_place import Place
from ltui.training.slurm.slurm_client import SlurmError, cancel, run_on_head, signal_steps
from ltui.training.store.run_directory import RunDir

REQUEST_TIMEOUT_S = 30.0
"""Seconds to wait for the answer of the run's supervisor on another machine."""


def request_from_job(run_dir: RunDir, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a request, or None if this machine supervises the run.

    Raises ``ProblemError`` if the request is refused or cannot be passed on.
    """
    place, record = job_place(run_dir), read_record(run_dir)
    if place is None or record is None or place.place in (Place.HERE, Place.ENDED):
        return None
    if place.place is Place.QUEUE:
        return _cancel(run_dir, record, request)
    return _pass_on(run_dir, record, request)


def ask_to_continue_later(run_dir: RunDir) -> None:
    """Signal the job of a run as SLURM does before the time limit, so that it is requeued.

    Raises ``ProblemError`` if the run has no job that runs.
    """
    record, place = read_record(run_dir), job_place(run_dir)
    if record is None or record.job_id is None or place is None:
        raise ProblemError.of(
            where=run_dir.id,
            what="it was not started by `ltui submit`, so there is no job to requeue.",
            remedy=f"`ltui stop {run_dir.id}` stops it with a checkpoint.",
        )
    last = record.last_life
    if place.place is Place.QUEUE or last is None or last.ended_at is not None:
        raise ProblemError.of(where=run_dir.id, what="its job does not run.")
    try:
        signal_steps(record.job_id, WARNING_SIGNAL)
    except SlurmError as error:
        raise ProblemError.of(
            where=run_dir.id, what=f"its job {record.job_id} could not be signalled ({error})."
        ) from error


def _cancel(run_dir: RunDir, record: JobRecord, request: dict[str, Any]) -> dict[str, Any]:
    command = request.get("cmd")
    if command not in ("stop", "kill"):
        raise ProblemError.of(
            where=run_dir.id,
            what=f"it waits in SLURM's queue, so it cannot {_COMMAND_WORDS.get(command, command)}.",
            remedy=f"`ltui stop {run_dir.id}` takes it out of the queue.",
        )
    assert record.job_id is not None
    try:
        cancel(record.job_id)
    except SlurmError as error:
        raise ProblemError.of(
            where=run_dir.id, what=f"its job {record.job_id} could not be cancelled ({error})."
        ) from error
    write_cancelled(run_dir)
    return {"ok": True}


_COMMAND_WORDS: dict[Any, str] = {
    "checkpoint": "save a checkpoint",
    "stop_when": "schedule a stop",
    "diagnose": "be diagnosed",
}


def _pass_on(run_dir: RunDir, record: JobRecord, request: dict[str, Any]) -> dict[str, Any]:
    """Send the request through a process that SLURM starts on the head's machine."""
    assert record.job_id is not None
    words = ("request", "--run", run_dir.id, "--token", record.token)
    timeout_s = REQUEST_TIMEOUT_S + (STOP_TIMEOUT_S if request.get("cmd") == "diagnose" else 0.0)
    try:
        output = run_on_head(
            record.job_id,
            record.head.node if record.head is not None else None,
            words,
            text=json.dumps(request),
            timeout_s=timeout_s,
        )
        answer = json.loads(output.strip().split("\n")[-1])
    except (SlurmError, ValueError) as error:
        raise ProblemError.of(
            where=run_dir.id,
            what=f"its supervisor in job {record.job_id} cannot be reached ({error}).",
        ) from error
    if not isinstance(answer, dict):
        raise ProblemError.of(where=run_dir.id, what="its supervisor gave no answer.")
    if problem := answer.get("problem"):
        raise ProblemError.of(where=run_dir.id, what=str(problem))
    return answer
