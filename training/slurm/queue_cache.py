"""What SLURM says about this user's jobs, asked at most twice a minute by all processes together.

The answer is kept in a file of ltui's home directory, which every dashboard and command reads. The
process that finds it too old asks again, while the others continue with the old answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.json_codec import from_json, to_json
from ltui.training.slurm.job_states import SlurmJob
from ltui.training.slurm.slurm_client import SlurmError, ended_jobs, installed, user_jobs
from ltui.training.store.run_directory import read_json, write_json

ASK_S = 30.0
"""Minimum seconds between two questions to SLURM by all processes of this user together."""
RETRY_S = 120.0
"""Seconds until the next question after one that SLURM did not answer."""
GONE = "GONE"
"""State of a job that squeue no longer shows."""
FORGOTTEN = "FORGOTTEN"
"""State of a job that neither squeue nor the accounting knows."""


class QueueAnswer(Struct, frozen=True):
    """The last answer of SLURM."""

    asked_at: float = 0.0
    """Unix time of the last question."""
    failed: str | None = None
    """Why the last question was not answered."""
    accounting: bool = True
    """False if the accounting is switched off."""
    jobs: Mapping[str, SlurmJob] = field(default_factory=dict)
    wanted: frozenset[str] = frozenset()
    """Jobs of runs of ltui. Their last state is kept when squeue no longer shows them."""

    def due(self, now_s: float) -> bool:
        waited = now_s - self.asked_at
        # A clock that was set back must not stop the questions.
        return waited < 0 or waited >= (ASK_S if self.failed is None else RETRY_S)


class QueueCache:
    """The answers of SLURM for one home directory."""

    def __init__(self, home: Path) -> None:
        self._path = home / "slurm-queue.json"
        self._lock_path = home / "slurm-queue.lock"

    def job(self, job_id: str, since_s: float = 0.0) -> SlurmJob | None:
        """Return a job of this user, or None if SLURM has not been asked about it yet.

        An answer from before ``since_s`` (unix time) does not count. A job of which SLURM knows
        nothing any more has the state ``GONE`` or ``FORGOTTEN``.
        """
        answer = self._read()
        job = answer.jobs.get(job_id)
        if job is not None and job.ended and job.state != GONE and answer.asked_at >= since_s:
            return job
        if answer.due(time.time()) and installed("squeue"):
            answer = self._ask(job_id) or answer
        return answer.jobs.get(job_id) if answer.asked_at >= since_s else None

    def _ask(self, job_id: str) -> QueueAnswer | None:
        """Ask SLURM, unless another process is asking now; then return None."""
        with self._locked() as locked:
            if not locked:
                return None
            before, now_s = self._read(), time.time()
            if not before.due(now_s):
                return before
            before = replace(before, asked_at=now_s, wanted=before.wanted | {job_id})
            # Written first, so that a process that dies while it waits does not ask again at once.
            self._write(before)
            try:
                answer = replace(_next_answer(before, job_id), failed=None)
            except SlurmError as error:
                answer = replace(before, failed=str(error))
            self._write(answer)
            return answer

    def _read(self) -> QueueAnswer:
        try:
            return from_json(QueueAnswer, read_json(self._path) or {})
        except ValueError:
            return QueueAnswer()

    def _write(self, answer: QueueAnswer) -> None:
        with contextlib.suppress(OSError):  # A full disk: the next process asks again.
            write_json(self._path, to_json(answer))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Lock the cache without waiting. The value is False if another process holds the lock."""
        try:
            handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield False
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(handle)


def _next_answer(before: QueueAnswer, job_id: str) -> QueueAnswer:
    """Ask squeue, or the accounting if squeue no longer shows ``job_id``. One question to SLURM."""
    jobs = {i: job for i, job in before.jobs.items() if i in before.wanted}
    gone = [i for i, job in jobs.items() if job.state == GONE]
    if job_id in gone:
        forgotten = {i: replace(jobs[i], state=FORGOTTEN) for i in gone}
        if not before.accounting:
            return replace(before, jobs={**jobs, **forgotten})
        try:
            return replace(before, jobs={**jobs, **forgotten, **ended_jobs(gone)})
        except SlurmError:
            return replace(before, jobs={**jobs, **forgotten}, accounting=False)
    current = user_jobs()
    for wanted in before.wanted - current.keys():
        last = jobs.get(wanted) or SlurmJob(job_id=wanted, state=GONE)
        jobs[wanted] = last if last.ended else replace(last, state=GONE)
    return replace(before, jobs={**jobs, **current})
