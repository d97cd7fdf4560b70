"""SLURM's commands: submit, requeue and cancel a job, and read the queue.

Every command is an argument list with a time limit. Output is parsed by fixed formats, because the
JSON of SLURM differs between versions.

All processes of a user together ask about the queue at most twice a minute. The answer is kept in a
file of ltui's home directory (``QueueCache``). The process that finds it too old asks again, while
the others continue with the old answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.json_codec import from_json, to_json
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import module_command
from ltui.training.slurm.batch_script import JOB_MODULE
from ltui.training.slurm.run_place import FORGOTTEN, GONE, SlurmJob
from ltui.training.store.run_directory import read_json, write_json

QUERY_TIMEOUT_S = 4.0
"""Seconds to wait for an answer about the queue."""
SUBMIT_TIMEOUT_S = 60.0
"""Seconds to wait for sbatch, scontrol and scancel."""
_SQUEUE_FORMAT = "%i|%T|%r|%S|%e|%N"
_SACCT_FORMAT = "JobIDRaw,State,ExitCode,Start,End,NodeList"
_JOB_ID = re.compile(r"(\d+)(?:;.*)?")


class SlurmError(Exception):
    """A command of SLURM that failed. The text is its own explanation in one line."""


def installed(program: str = "sbatch") -> bool:
    """Return whether a command of SLURM can be run."""
    return shutil.which(program) is not None


def submit(script: Path, cwd: str, options: Sequence[str] = ()) -> str:
    """Submit a batch script and return the number of its job.

    Raises ``SlurmError`` if sbatch rejects it. ``options`` come in addition to those in the script.
    """
    output = _run(
        ["sbatch", "--parsable", *options, str(script)],
        SUBMIT_TIMEOUT_S,
        cwd=cwd,
        environment=outside_job(os.environ),
    )
    match = _JOB_ID.fullmatch(output.strip().split("\n")[-1].strip())
    if match is None:
        raise SlurmError(f"sbatch printed no job number: {_plain(output, 200)}")
    return match[1]


def requeue(job_id: str) -> None:
    """Put a running job back into the queue. This ends the processes of the job."""
    _run(["scontrol", "requeue", job_id], SUBMIT_TIMEOUT_S)


def cancel(job_id: str) -> None:
    """Cancel a job."""
    _run(["scancel", job_id], SUBMIT_TIMEOUT_S)


def signal_steps(job_id: str, name: str) -> None:
    """Send a signal to all processes of the steps of a job."""
    _run(["scancel", f"--signal={name}", job_id], SUBMIT_TIMEOUT_S)


def on_head_words(job_id: str, node: str | None, words: Sequence[str]) -> list[str]:
    """Return the command that runs a step of ``JOB_MODULE`` beside a running job.

    It runs on the machine ``node``, or on the first one of the job, without GPUs of its own.
    """
    place = () if node is None else (f"--nodelist={node}",)
    return [
        "srun", "--overlap", f"--jobid={job_id}", *place, "--nodes=1", "--ntasks=1",
        "--gres=none", "--quiet", *module_command(JOB_MODULE, *words),
    ]  # fmt: skip


def run_on_head(
    job_id: str, node: str | None, words: Sequence[str], *, text: str, timeout_s: float
) -> str:
    """Run a step of ``JOB_MODULE`` beside a running job, and return its output.

    ``text`` is its standard input. Raises ``SlurmError``.
    """
    command = on_head_words(job_id, node, words)
    return _run(command, timeout_s, environment=outside_job(os.environ), text=text)


def user_jobs() -> dict[str, SlurmJob]:
    """Return the jobs of this user, including those that ended some minutes ago."""
    user = pwd.getpwuid(os.getuid()).pw_name
    output = _run(
        ["squeue", "--noheader", "--states=all", f"--user={user}", f"--format={_SQUEUE_FORMAT}"],
        QUERY_TIMEOUT_S,
    )
    jobs = (_queue_line(line) for line in output.splitlines())
    return {job.job_id: job for job in jobs if job is not None}


def ended_jobs(job_ids: Sequence[str]) -> dict[str, SlurmJob]:
    """Return jobs that squeue has forgotten, from the accounting. It is often switched off."""
    output = _run(
        [
            "sacct", "--noheader", "--allocations", "--parsable2", "--duplicates",
            f"--jobs={','.join(job_ids)}", f"--format={_SACCT_FORMAT}",
        ],
        QUERY_TIMEOUT_S,
    )  # fmt: skip
    jobs = (_accounting_line(line) for line in output.splitlines())
    # The last line of a job that was requeued describes its last start.
    return {job.job_id: job for job in jobs if job is not None}


def job_properties(job_id: str) -> dict[str, str]:
    """Return what ``scontrol show job`` prints: ``{"JobState": "RUNNING", ...}``."""
    output = _run(["scontrol", "--oneliner", "show", "job", job_id], QUERY_TIMEOUT_S)
    return dict(word.split("=", 1) for word in output.split() if "=" in word)


def unix_time(text: str) -> float | None:
    """Return the time of ``2026-05-03T14:30:00``, in the zone of this machine; None for ``N/A``."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None


def _queue_line(line: str) -> SlurmJob | None:
    fields = line.strip().split("|", 5)
    if len(fields) != 6:
        return None
    job_id, state, reason, start, _, nodes = fields
    return SlurmJob(
        job_id=job_id,
        state=state,
        reason=reason or None,
        start_at=unix_time(start),
        nodes=nodes or None,
    )


def _accounting_line(line: str) -> SlurmJob | None:
    fields = line.strip().split("|", 5)
    if len(fields) != 6:
        return None
    job_id, state, exit_code, start, _, nodes = fields
    code = exit_code.split(":")[0]
    return SlurmJob(
        job_id=job_id,
        # ``CANCELLED by 1000``
        state=state.split(" ")[0],
        start_at=unix_time(start),
        nodes=None if nodes in ("", "None assigned") else nodes,
        exit_code=int(code) if code.isdecimal() else None,
    )


def outside_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of the job that this process runs in."""
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_"))
    }


def _run(
    words: Sequence[str],
    timeout_s: float,
    *,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
    text: str = "",
) -> str:
    """Run a command of SLURM with ``text`` as its input, and return its output.

    Raises ``SlurmError``.
    """
    variables = os.environ if environment is None else environment
    try:
        done = subprocess.run(
            list(words),
            cwd=cwd,
            env={**variables, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"},
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{words[0]} is not installed on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{words[0]} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise SlurmError(f"{words[0]} cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        raise SlurmError(explanation(words[0], done.stderr) or f"{words[0]} failed")
    return done.stdout


def explanation(program: str, text: str) -> str:
    """Return the error messages of a command of SLURM as one line."""
    prefix = re.compile(rf"^{re.escape(program)}: (?:error|fatal): ")
    lines = [_plain(prefix.sub("", line.strip()), 300) for line in text.splitlines()]
    return "; ".join(line for line in lines if line)


def _plain(text: str, length: int) -> str:
    """Return printable text of one line."""
    return "".join(c if c.isprintable() else " " for c in text).strip()[:length]


def require_sbatch() -> None:
    """Raise ``ProblemError`` if this machine cannot submit jobs."""
    if not installed():
        raise ProblemError.of(
            where="ltui submit",
            what="sbatch was not found on PATH, so no job can be submitted here.",
            remedy="Run it on a login node of the cluster, or print the script with --print.",
        )


ASK_S = 30.0
"""Minimum seconds between two questions to SLURM by all processes of this user together."""
RETRY_S = 120.0
"""Seconds until the next question after one that SLURM did not answer."""


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
