"""Open the dashboard of a run on the machine where its SLURM job runs."""

from __future__ import annotations

import os
import shlex
import subprocess

from ltui.app.nodes.start_head import NOT_FOUND, SSH_FAILED, own_program
from ltui.training.config.node_environment import is_host
from ltui.training.lifecycle.job_control import job_place
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import module_command
from ltui.training.slurm.batch_script import JOB_MODULE
from ltui.training.slurm.job_record import read_record
from ltui.training.slurm.run_place import Place
from ltui.training.slurm.slurm_client import installed, on_head_words, outside_job
from ltui.training.store.run_directory import RunDir


def attach_words(run_dir: RunDir, *, readonly: bool = False) -> list[str] | None:
    """Return the command that opens the dashboard on the run's machine; None if it is this one.

    It is a step of the job, or ssh if srun is missing here. Raises ``ProblemError`` if the run is
    elsewhere and neither can be used.
    """
    place, record = job_place(run_dir), read_record(run_dir)
    if place is None or record is None or place.place is not Place.ELSEWHERE:
        return None
    words = ["attach", "--run", run_dir.id, "--token", record.token]
    words += ["--readonly"] if readonly else []
    if installed("srun") and record.job_id is not None:
        node = record.head.node if record.head is not None else None
        srun, *rest = on_head_words(record.job_id, node, words)
        return [srun, "--pty", *rest]
    if record.head is not None and installed("ssh"):
        remote = shlex.join(module_command(JOB_MODULE, *words))
        return ["ssh", "-t", "--", record.head.host, remote]
    raise ProblemError.of(
        where=run_dir.id,
        what=f"{place.detail or 'it runs on another machine'}, and there is no srun or ssh here.",
        remedy="Open the dashboard on that machine.",
    )


def ssh_words(name: str, *, readonly: bool, at: str | None = None) -> list[str]:
    """Return the command that opens the dashboard of ``host:run`` by ssh. Raises ``ProblemError``.

    ltui is looked for at the path that it has on this machine.
    """
    host, _, run = name.rpartition(":")
    if not is_host(host) or not run:
        raise ProblemError.of(
            where=f"ltui attach {name}",
            what="this does not name a host and a run.",
            remedy="Write HOST:RUN, such as gpu-02:last.",
        )
    if not installed("ssh"):
        raise ProblemError.of(
            where=f"ltui attach {name}",
            what="ssh is not installed here.",
            remedy="Install it, or log in on that machine and run `ltui attach` there.",
        )
    words = [*own_program(), "attach", run, *(["--readonly"] if readonly else [])]
    words += [] if at is None else [f"--at={at}"]
    return ["ssh", "-t", "--", host, shlex.join(words)]


def run_on_terminal(words: list[str]) -> int:
    """Run a command on this terminal and return its exit code. Raises ``ProblemError``."""
    try:
        code = subprocess.run(words, env=outside_job(os.environ), check=False).returncode
    except OSError as error:
        raise ProblemError.of(
            where=words[0], what=f"it cannot be run ({error.strerror})."
        ) from error
    if words[0] == "ssh":
        _check_ssh(words, code)
    return code


def _check_ssh(words: list[str], code: int) -> None:
    """Raise ``ProblemError`` if ssh could not connect or could not run the command there."""
    host, command = words[-2:]
    if code == SSH_FAILED:
        raise ProblemError.of(
            where=host,
            what="ssh could not connect, or its connection broke; its own message is above.",
            remedy=f"`ssh {host} true` must work.",
        )
    if code in NOT_FOUND:
        raise ProblemError.of(
            where=host,
            what=f"{shlex.split(command)[0]} cannot be run there.",
            remedy="Install ltui there at the same path, or log in there and run `ltui attach`.",
        )
