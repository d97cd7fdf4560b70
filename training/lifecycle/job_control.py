"""Carry out requests for a run that waits in SLURM's queue or runs on another machine."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

from msgspec.structs import replace

from ltui.training.problem import ProblemError
from ltui.training.shared.defaults import STOP_TIMEOUT_S
from ltui.training.slurm.batch_script import WARNING_SIGNAL
from ltui.training.slurm.job_record import JobRecord, read_record, snapshot_path, write_cancelled
from ltui.training.slurm.run_place import Place, RunPlace, SlurmJob, place_of
from ltui.training.slurm.slurm_client import SlurmError, cancel, run_on_head, signal_steps
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState, snapshot_from_json
from ltui.training.store.run_checkpoints import list_checkpoints
from ltui.training.store.run_directory import RunDir, read_json


def job_place(run_dir: RunDir) -> RunPlace | None:
    """Return where a run that SLURM starts is, or None if SLURM does not start the run.

    SLURM is asked only if the record does not say it.
    """
    record = read_record(run_dir)
    return None if record is None else place_of(record, _job(run_dir, record), time.time())


def _job(run_dir: RunDir, record: JobRecord) -> SlurmJob | None:
    last = record.last_life
    running_elsewhere = (
        last is not None
        and last.ended_at is None
        and record.head is not None
        and not record.head.is_here
    )
    if record.job_id is None or not (record.waits or running_elsewhere):
        return None
    # Imported here, and below, because most runs have no job that waits.
    from ltui.training.slurm.slurm_client import QueueCache

    # What SLURM said of the job before its last start ended says nothing about the next start.
    since_s = last.ended_at if last is not None and last.ended_at is not None else 0.0
    return QueueCache(run_dir.home).job(record.job_id, since_s)


def snapshot_of_job(run_dir: RunDir) -> RunSnapshot | None:
    """Return the snapshot of a run that waits in SLURM's queue or runs on another machine.

    None means that the files and processes of this machine know the state of the run.
    """
    place = job_place(run_dir)
    if place is None or place.place is Place.HERE:
        return None
    assert place.state is not None
    base = _published(run_dir) or _from_specification(run_dir)
    if place.place is Place.ELSEWHERE and base.state in LIVE and base.taken_at is not None:
        # The head publishes its snapshot, which says more than SLURM does.
        return base if base.state is not RunState.QUEUED else replace(base, detail=place.detail)
    return replace(
        base,
        state=place.state,
        detail=place.detail,
        supervisor_pid=None,
        ended_at=base.ended_at if place.state not in LIVE else None,
        eta_s=None,
        ranks=(),
        gpus=(),
        verdicts=(),
    )


def with_job(run_dir: RunDir, snapshot: RunSnapshot) -> RunSnapshot:
    """Return the snapshot of a run on this machine with what its SLURM job adds to it.

    A run that has stopped to continue in the next start of its job is queued; it starts when that
    has begun, before its attempt has. Of a run that is not continued, the detail says why.
    """
    record = None if snapshot.state in LIVE else read_record(run_dir)
    if record is None:
        return snapshot
    last = record.last_life
    if last is not None and last.ended_at is None:
        ended_before = (snapshot.ended_at or math.inf) < last.started_at
        # The job itself has to find the run as it is.
        begins = ended_before and os.environ.get("SLURM_JOB_ID") != last.job_id
        continues = last.requeued and snapshot.state is not RunState.FINISHED
        if (begins or continues) and not _has_ended(run_dir, last.job_id):
            if begins:
                state, detail = RunState.STARTING, f"job {last.job_id} starts it"
                return replace(snapshot, state=state, detail=detail, ended_at=None, exit_code=None)
            detail = f"{snapshot.detail or snapshot.state.value}; its job is being requeued"
            return replace(snapshot, state=RunState.QUEUED, detail=detail)
    if record.note is None:
        return snapshot
    return replace(snapshot, detail="; ".join(t for t in (snapshot.detail, record.note) if t))


def _has_ended(run_dir: RunDir, job_id: str) -> bool:
    # Imported here because few jobs are asked for.
    from ltui.training.slurm.slurm_client import QueueCache

    job = QueueCache(run_dir.home).job(job_id)
    return job is not None and job.ended


def _published(run_dir: RunDir) -> RunSnapshot | None:
    """Return the snapshot that the head published last."""
    document = read_json(snapshot_path(run_dir))
    if document is None:
        return None
    try:
        return snapshot_from_json(document)
    except ValueError:
        return None


def _from_specification(run_dir: RunDir) -> RunSnapshot:
    spec = run_dir.read_spec()
    return RunSnapshot(
        id=run_dir.id,
        name=spec.name,
        state=RunState.QUEUED,
        preset=spec.preset,
        command=spec.command,
        saves_checkpoints=True if spec.command is None else None,
        stop_signal=spec.stop_signal,
        created_at=spec.created_at,
        checkpoints=tuple(list_checkpoints(run_dir.checkpoints_dir)),
        run_dir=str(run_dir.path),
    )


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
    "sample": "be sampled",
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
