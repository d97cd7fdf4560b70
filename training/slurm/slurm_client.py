"""SLURM's commands: submit, requeue and cancel a job, and read the queue.

Every command is an argument list with a time limit. Output is parsed by fixed formats, because the
JSON of SLURM differs between versions.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ltui.training.problem import ProblemError
from ltui.training.process.python_command import module_command
from ltui.training.slurm.batch_script import JOB_MODULE
from ltui.training.slurm.job_states import SlurmJob

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
    job_id, state, reason, start, end, nodes = fields
    return SlurmJob(
        job_id=job_id,
        state=state,
        reason=reason or None,
        start_at=unix_time(start),
        end_at=unix_time(end),
        nodes=nodes or None,
    )


def _accounting_line(line: str) -> SlurmJob | None:
    fields = line.strip().split("|", 5)
    if len(fields) != 6:
        return None
    job_id, state, exit_code, start, end, nodes = fields
    code = exit_code.split(":")[0]
    return SlurmJob(
        job_id=job_id,
        # ``CANCELLED by 1000``
        state=state.split(" ")[0],
        start_at=unix_time(start),
        end_at=unix_time(end),
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
