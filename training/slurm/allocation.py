"""The job that this process runs in, and what it costs to pause a run in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ltui.training.state.run_snapshot import JobSnapshot


def job_of_environment(environ: Mapping[str, str]) -> JobSnapshot | None:
    """Return the SLURM job of a process with this environment, or None if it is in no job."""
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    nodes = _number(environ.get("SLURM_JOB_NUM_NODES")) or 1
    per_node = _number(environ.get("SLURM_GPUS_ON_NODE"))
    ends_at = _number(environ.get("SLURM_JOB_END_TIME"))
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


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None
