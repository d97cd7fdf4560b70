"""Where a run that SLURM starts is at the moment, from its record and its job, in words. Pure.

The record of ltui comes first. The state of the job only says what the record cannot: why the job
waits, and that it ended without recording anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import Enum

from msgspec import Struct

from ltui.training.config.node_environment import whole_number
from ltui.training.slurm.job_record import JobRecord
from ltui.training.state.run_snapshot import JobSnapshot, RunState

PENDING_STATES = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of a job that waits in the queue."""
ACTIVE_STATES = frozenset(
    {
        "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
        "RESIZING",
    }
)  # fmt: skip
"""States of a job that has nodes."""
GONE = "GONE"
"""State of a job that squeue no longer shows."""
FORGOTTEN = "FORGOTTEN"
"""State of a job that neither squeue nor the accounting knows."""
_STATE_WORDS = {
    "PENDING": "waits",
    "REQUEUED": "is requeued",
    "REQUEUE_FED": "is requeued",
    "REQUEUE_HOLD": "is requeued and held",
    "SPECIAL_EXIT": "is requeued and held",
    "CONFIGURING": "nodes are being prepared",
    "RUNNING": "runs",
    "COMPLETING": "is ending",
    "SUSPENDED": "is suspended by SLURM",
    "STOPPED": "is stopped by SLURM",
    "SIGNALING": "is being signalled",
    "STAGE_OUT": "copies its files back",
    "RESIZING": "changes its size",
    "COMPLETED": "ended with exit code 0",
    "CANCELLED": "was cancelled",
    "FAILED": "ended with an error",
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "passed its deadline",
    "OUT_OF_MEMORY": "used more memory than it had requested",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted by a job of higher priority",
    "BOOT_FAIL": "could not start its nodes",
    "REVOKED": "was moved to another cluster",
    GONE: "is no longer known to SLURM",
    FORGOTTEN: "is no longer known to SLURM",
}
_REASON_WORDS = {
    "None": "waits for the scheduler",
    "Priority": "waits for priority",
    "Resources": "waits for free nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that failed, and will never start",
    "BeginTime": "waits for its start time",
    "JobHeldUser": "is held by its user (`scontrol release` starts it)",
    "JobHeldAdmin": "is held by an administrator",
    "PartitionDown": "waits for its partition, which is down",
    "PartitionInactive": "waits for its partition, which is inactive",
    "PartitionNodeLimit": "requests more nodes than its partition allows",
    "PartitionTimeLimit": "requests more time than its partition allows",
    "ReqNodeNotAvail": "waits for a node that is reserved or down",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a licence",
    "NodeDown": "waits for a node that is down",
    "BadConstraints": "requests nodes that do not exist",
    "Cleaning": "waits until its previous start is cleaned up",
    "AssocGrpGRES": "waits: the account uses all of its GPUs",
    "InvalidAccount": "has an account that is not valid",
    "InvalidQOS": "has a QOS that is not valid",
    "JobHoldMaxRequeue": "is held, because it was requeued too often",
    "Prolog": "waits for the prolog on its nodes",
}
_LIMIT_PREFIXES = ("QOS", "Assoc", "Max", "Grp")


class SlurmJob(Struct, frozen=True, kw_only=True):
    """One job as squeue or sacct shows it."""

    job_id: str
    state: str
    reason: str | None = None
    nodes: str | None = None
    """Names of its nodes: ``n[07-08]``."""
    start_at: float | None = None
    """Unix time of its start; the expected one while it waits."""
    exit_code: int | None = None

    @property
    def pending(self) -> bool:
        return self.state in PENDING_STATES

    @property
    def ended(self) -> bool:
        return self.state not in PENDING_STATES and self.state not in ACTIVE_STATES


def state_words(state: str) -> str:
    """Return what a state of a job means, as the end of a sentence: ``was preempted by ...``."""
    return _STATE_WORDS.get(state, f"is in the state {state}")


def reason_words(reason: str | None) -> str:
    """Return why a job waits: ``waits for priority``."""
    name = (reason or "None").strip("()").split(",")[0].split(" ")[0] or "None"
    if (words := _REASON_WORDS.get(name)) is not None:
        return words
    if name.startswith(_LIMIT_PREFIXES):
        return f"waits: a limit of the account or QOS is reached ({name})"
    return f"waits ({name})"


def queued_detail(job: SlurmJob | None, job_id: str, now_s: float) -> str:
    """Return the detail of a run whose job waits.

    ``queued in SLURM: waits for priority, expected start 14:30``. ``job`` is None while SLURM has
    not been asked.
    """
    if job is None:
        return f"queued in SLURM (job {job_id})"
    words = reason_words(job.reason) if job.state == "PENDING" else state_words(job.state)
    text = f"queued in SLURM: {words}"
    if job.start_at is not None and job.start_at > now_s:
        text += f", expected start {clock_words(job.start_at, now_s)}"
    return text


def clock_words(at_s: float, now_s: float) -> str:
    """Return a time of day, with the date unless it is today: ``14:30``, ``3 May 14:30``."""
    at, now = datetime.fromtimestamp(at_s), datetime.fromtimestamp(now_s)
    clock = f"{at:%H:%M}"
    return clock if at.date() == now.date() else f"{at.day} {at:%b} {clock}"


def job_of_environment(environ: Mapping[str, str]) -> JobSnapshot | None:
    """Return the SLURM job of a process with this environment, or None if it is in no job."""
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    nodes = whole_number(environ.get("SLURM_JOB_NUM_NODES")) or 1
    per_node = whole_number(environ.get("SLURM_GPUS_ON_NODE"))
    ends_at = whole_number(environ.get("SLURM_JOB_END_TIME"))
    return JobSnapshot(
        id=job_id,
        nodes=nodes,
        node_names=environ.get("SLURM_JOB_NODELIST") or None,
        gpus=None if per_node is None else per_node * nodes,
        ends_at=None if ends_at is None else float(ends_at),
        partition=environ.get("SLURM_JOB_PARTITION") or None,
    )


def pause_cost(job: JobSnapshot, run_id: str, now_s: float) -> str:
    """Return what a paused run occupies, and how to give it back."""
    nodes = "its node" if job.nodes == 1 else f"{job.nodes} nodes"
    gpus = "" if not job.gpus else f" and {job.gpus} GPU{'' if job.gpus == 1 else 's'}"
    until = "" if job.ends_at is None else f" for another {_duration(job.ends_at - now_s)}"
    return (
        f"job {job.id} keeps {nodes}{gpus}{until}; `ltui stop {run_id} --requeue` gives them back "
        "and continues later"
    )


def _duration(seconds: float) -> str:
    minutes = max(0, round(seconds / 60.0))
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


class Place(Enum):
    """Who knows the state of the run."""

    QUEUE = "queue"
    """Its job waits."""
    HERE = "here"
    """The processes of this machine, or the files of a run that has ended."""
    ELSEWHERE = "elsewhere"
    """Another machine, on which its job runs."""
    ENDED = "ended"
    """Its job ended without leaving a record in this directory."""


class RunPlace(Struct, frozen=True, kw_only=True):
    """The place of a run. ``state`` and ``detail`` are set unless it is ``HERE``."""

    place: Place
    state: RunState | None = None
    detail: str | None = None

    @property
    def is_here(self) -> bool:
        """True if the files and processes of this machine know the state of the run."""
        return self.place is Place.HERE


FIRST_RECORD_S = 120.0
"""Seconds after the start of a job in which its first record is awaited. After that, the run has a
folder on another machine, and SLURM's state is all that is known here."""
_STATE_OF_EXIT_CODE = {0: RunState.FINISHED, 3: RunState.STOPPED}
"""State of a run by the exit code of its job, which is that of `ltui run`."""


def place_of(record: JobRecord, job: SlurmJob | None, now_s: float) -> RunPlace:
    """Return where the run is. ``job`` is None if SLURM has not answered about it."""
    last = record.last_life
    if last is not None and last.ended_at is None:
        head = record.head
        if head is None or head.is_here or (job is not None and job.ended):
            return RunPlace(place=Place.HERE)
        return RunPlace(
            place=Place.ELSEWHERE, state=RunState.RUNNING, detail=_elsewhere(record, head.host)
        )
    if record.waits:
        return _waiting(record, job, now_s)
    if last is None:
        detail = "cancelled while it waited in SLURM's queue: nothing was trained"
        return RunPlace(place=Place.ENDED, state=RunState.STOPPED, detail=detail)
    return RunPlace(place=Place.HERE)


def _waiting(record: JobRecord, job: SlurmJob | None, now_s: float) -> RunPlace:
    job_id = record.job_id
    if job_id is None:
        detail = "its job was not submitted: `ltui submit` was interrupted"
        return RunPlace(place=Place.ENDED, state=RunState.FAILED, detail=detail)
    if job is None or job.pending:
        return RunPlace(
            place=Place.QUEUE, state=RunState.QUEUED, detail=queued_detail(job, job_id, now_s)
        )
    if not job.ended and record.last_life is not None:
        # The next start of the job records itself here as soon as it runs.
        detail = f"its job {job_id} {state_words(job.state)}; the next start has not begun"
        return RunPlace(place=Place.QUEUE, state=RunState.QUEUED, detail=detail)
    if not job.ended:
        begins = job.start_at is not None and now_s - job.start_at < FIRST_RECORD_S
        return RunPlace(
            place=Place.ELSEWHERE,
            state=RunState.STARTING if begins else RunState.RUNNING,
            detail=_elsewhere(record, job.nodes),
        )
    return _ended(record, job)


def _ended(record: JobRecord, job: SlurmJob) -> RunPlace:
    """Return the end of a run whose job ended without a record of it here."""
    if record.last_life is not None:
        # An earlier start of the job has recorded how far the run came.
        return RunPlace(place=Place.HERE)
    detail = f"SLURM's job {job.job_id} {state_words(job.state)}"
    if job.state == "CANCELLED":
        return RunPlace(place=Place.ENDED, state=RunState.STOPPED, detail=detail)
    state = _STATE_OF_EXIT_CODE.get(-1 if job.exit_code is None else job.exit_code)
    if job.state == "COMPLETED" and job.exit_code is None:
        state = RunState.FINISHED
    where = f"; its folder is on {job.nodes}" if job.nodes else ""
    return RunPlace(
        place=Place.ENDED,
        state=state or (RunState.LOST if job.state in (GONE, FORGOTTEN) else RunState.FAILED),
        detail=f"{detail}{where}",
    )


def _elsewhere(record: JobRecord, host: str | None) -> str:
    on = f" on {host}" if host else ""
    return f"job {record.job_id} runs{on}"
