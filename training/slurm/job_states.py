"""SLURM's states and reasons of a job in words. Pure."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

PENDING_STATES = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of a job that waits in the queue."""
ACTIVE_STATES = frozenset(
    {
        "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
        "RESIZING",
    }
)  # fmt: skip
"""States of a job that has nodes."""

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
    "GONE": "is no longer known to SLURM",
    "FORGOTTEN": "is no longer known to SLURM",
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
    end_at: float | None = None
    """Unix time at which it ends at the latest, or ended."""
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
