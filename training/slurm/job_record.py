"""What a run directory records about the SLURM jobs of its run.

The folder ``slurm`` of the run directory holds one file for each writer:

- ``submission.json``: written by ``ltui submit``, and by the job if it cannot see that file,
- ``lives.json``, ``head.json`` and ``snapshot.json``: written by the job on its first node,
- ``cancelled.json``: written by whoever cancels the job while it waits.

The lives of a run under SLURM: one start of its job each, and whether another may follow. A job
that is requeued runs its script again. Each such life is one attempt of the run. A life makes
progress if it leaves a good checkpoint of a later step than the one it began with.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.config.node_environment import is_host
from ltui.training.json_codec import from_json, to_json
from ltui.training.process.identity import boot_id
from ltui.training.slurm.batch_script import JobOptions
from ltui.training.store.run_directory import RunDir, read_json, write_json

_JOB_ID = re.compile(r"\d+([_+.]\d+)*")
LIVES_WITHOUT_PROGRESS = 3
"""Number of lives in a row without progress after which a run is not started again."""


class Life(Struct, frozen=True, kw_only=True):
    """One start of the job of a run."""

    job_id: str
    restart: int = 0
    """How often SLURM had restarted this job before."""
    host: str | None = None
    started_at: float
    start_step: int = 0
    """Step of the checkpoint that it began with; 0 without one."""
    ended_at: float | None = None
    """None while it runs, or if it was killed before it could record its end."""
    end_step: int | None = None
    """Step of the last good checkpoint when it ended."""
    outcome: str | None = None
    """State of the run when it ended."""
    requeued: bool = False
    """True if the job was then requeued, or followed by another one, to continue the run."""

    @property
    def made_progress(self) -> bool:
        return self.end_step is not None and self.end_step > self.start_step


def refusal(lives: Sequence[Life]) -> str | None:
    """Return why the run must not be started again, or None. All ``lives`` have ended."""
    last = lives[-LIVES_WITHOUT_PROGRESS:]
    if len(last) < LIVES_WITHOUT_PROGRESS or any(life.made_progress for life in last):
        return None
    step = last[-1].end_step if last[-1].end_step is not None else last[-1].start_step
    position = f"still at step {step}" if step else "it has no checkpoint yet"
    return f"no progress in {LIVES_WITHOUT_PROGRESS} starts of its job ({position})"


class Head(Struct, frozen=True, kw_only=True):
    """The machine that holds the run while a job runs, and until when it may."""

    job_id: str
    host: str
    boot_id: str | None
    node: str | None = None
    """SLURM's name of the machine."""
    ends_at: float | None = None
    """Unix time of the job's time limit."""
    nodes: str | None = None

    @property
    def is_here(self) -> bool:
        """True if the head is this machine, in its current boot."""
        return self.boot_id is not None and self.boot_id == boot_id()


class JobRecord(Struct, frozen=True, kw_only=True):
    """Everything that is recorded about the jobs of one run."""

    token: str
    submitted_at: float
    options: JobOptions
    first_job_id: str | None = field(name="job_id", default=None)
    """None until sbatch has answered."""
    private: bool = False
    """True if the job created this directory, because it could not see that of ``ltui submit``."""
    lives: tuple[Life, ...] = ()
    next_job_id: str | None = None
    """The job that follows the last life, if that is another one."""
    counted_from: int = 0
    """Number of lives before a person resumed the run. They do not count as lives without
    progress."""
    note: str | None = None
    """Why the run was not continued: ``not requeued: no progress in 3 starts of its job``."""
    head: Head | None = None
    cancelled_at: float | None = field(name="at", default=None)

    @property
    def job_id(self) -> str | None:
        """The job that runs or continues the run."""
        if self.next_job_id is not None:
            return self.next_job_id
        return self.lives[-1].job_id if self.lives else self.first_job_id

    def with_lives(
        self, lives: Sequence[Life], *, next_job_id: str | None = None, note: str | None = None
    ) -> JobRecord:
        """Return the record with other lives. The job and the note of earlier ones are gone."""
        return replace(self, lives=tuple(lives), next_job_id=next_job_id, note=note)

    @property
    def counted_lives(self) -> tuple[Life, ...]:
        """The lives since a person last started or resumed the run."""
        return self.lives[self.counted_from :]

    @property
    def last_life(self) -> Life | None:
        return self.lives[-1] if self.lives else None

    @property
    def waits(self) -> bool:
        """True if the job has not started yet, or has to start again."""
        last = self.last_life
        if self.cancelled_at is not None and (
            last is None or last.ended_at is None or self.cancelled_at >= last.ended_at
        ):
            return False
        return last is None or (last.ended_at is not None and last.requeued)


def script_path(run_dir: RunDir) -> Path:
    """Return the path of the batch script."""
    return run_dir.slurm_dir / "job.sh"


def snapshot_path(run_dir: RunDir) -> Path:
    """Return the path of the snapshot that the job publishes for other machines."""
    return run_dir.slurm_dir / "snapshot.json"


def read_record(run_dir: RunDir) -> JobRecord | None:
    """Return the record of a run; None if SLURM does not start the run.

    A copy of the run directory has no record: the job is that of the original.
    """
    folder = run_dir.slurm_dir
    submission = read_json(folder / "submission.json")
    if submission is None or submission.get("run", run_dir.id) != run_dir.id:
        return None
    document = {
        **submission,
        **(read_json(folder / "lives.json") or {}),
        "head": read_json(folder / "head.json"),
        **(read_json(folder / "cancelled.json") or {}),
    }
    try:
        record = from_json(JobRecord, document)
    except ValueError:
        return None
    return record if _is_safe(record) else None


def _is_safe(record: JobRecord) -> bool:
    """Return True if no number of a job and no host could be an option for SLURM or ssh.

    Whoever gives a run to somebody chooses what its files contain.
    """
    head = record.head
    ids = (record.first_job_id, record.next_job_id, *(life.job_id for life in record.lives))
    named = [str(job_id) for job_id in ids if job_id is not None]
    if head is not None and not (is_host(head.host) and _JOB_ID.fullmatch(head.job_id)):
        return False
    return all(_JOB_ID.fullmatch(job_id) for job_id in named)


def write_submission(run_dir: RunDir, record: JobRecord) -> None:
    """Write the part of ``record`` that is known at submission."""
    folder = run_dir.slurm_dir
    folder.mkdir(mode=0o700, exist_ok=True)
    write_json(
        folder / "submission.json",
        {
            "run": run_dir.id,
            "token": record.token,
            "submitted_at": record.submitted_at,
            "options": to_json(record.options),
            "job_id": record.first_job_id,
            "private": record.private,
        },
    )


def write_lives(run_dir: RunDir, record: JobRecord) -> None:
    """Write the lives of ``record``, what follows the last one, and the note.

    Called by the job on its first node, or by a person's resume.
    """
    document = {name: to_json(getattr(record, name)) for name in _FIELDS_OF_LIVES}
    write_json(run_dir.slurm_dir / "lives.json", document)


_FIELDS_OF_LIVES = ("lives", "next_job_id", "counted_from", "note")


def write_resubmitted(run_dir: RunDir, record: JobRecord, job_id: str) -> None:
    """Record that a person has submitted another job for a run that had ended."""
    (run_dir.slurm_dir / "cancelled.json").unlink(missing_ok=True)
    if not record.lives:
        write_submission(run_dir, replace(record, first_job_id=job_id))
        return
    lives = (*record.lives[:-1], replace(record.lives[-1], requeued=True))
    record = record.with_lives(lives, next_job_id=job_id)
    write_lives(run_dir, replace(record, counted_from=len(lives)))


def write_head(run_dir: RunDir, job_id: str, ends_at: float | None, nodes: str | None) -> None:
    """Record that this machine holds the run."""
    head = Head(
        job_id=job_id,
        host=socket.gethostname(),
        boot_id=boot_id(),
        node=os.environ.get("SLURMD_NODENAME"),
        ends_at=ends_at,
        nodes=nodes,
    )
    write_json(run_dir.slurm_dir / "head.json", to_json(head))


def write_cancelled(run_dir: RunDir) -> None:
    """Record that the waiting job was cancelled."""
    write_json(run_dir.slurm_dir / "cancelled.json", {"at": time.time()})


def with_unfinished_closed(
    lives: Sequence[Life], step: int | None, now_s: float
) -> tuple[Life, ...]:
    """Return ``lives`` with an end for a life that was killed before it could record its own.

    ``step`` is the step of the last good checkpoint.
    """
    return tuple(
        replace(life, ended_at=now_s, end_step=step, outcome=life.outcome or "lost")
        if life.ended_at is None
        else life
        for life in lives
    )
