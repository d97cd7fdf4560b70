"""Start the other nodes of a run with the system's ssh client.

The client runs in batch mode and accepts only known host keys, so it never asks. The key of the run
goes through its standard input. A remote shell reads the command, so every word of it is quoted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from ltui.training.nodes.link_key import KEY_VARIABLE, LinkKey
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.python_command import module_command
from ltui.widgets.sanitise import clean_line

CONNECT_S = 15
"""Seconds to wait for a connection."""
START_S = 180.0
"""Seconds within which the command on another node must end."""
_PARALLEL = 32
"""Maximum number of connections at the same time."""
NOT_FOUND = (126, 127)
"""Exit codes of a shell that cannot run a command."""
SSH_FAILED = 255
"""Exit code of ssh for its own errors."""


class RemoteCommand(Struct, frozen=True):
    """A command on a host, and the text for its standard input."""

    host: str
    words: tuple[str, ...]
    stdin: str = ""


def own_program() -> tuple[str, ...]:
    """Return the command of this ltui, which other nodes probably have at the same place."""
    script = Path(sys.executable).parent / "ltui"
    return (str(script),) if script.exists() else tuple(module_command("ltui.app.cli"))


def remote_program(path: str | None) -> tuple[str, ...]:
    """Return the command of ltui on other nodes; ``path`` is that of ``--remote-ltui``."""
    return own_program() if path is None else (path,)


def check_hosts(hosts: Sequence[str], program: Sequence[str]) -> None:
    """Raise ``ProblemError`` with a sentence for each host that cannot be used.

    Every host must be reached without a question and have the same version of ltui. Nothing is
    started.
    """
    if shutil.which("ssh") is None:
        raise ProblemError.of(
            where="--nodes",
            what="the program ssh is not installed.",
            remedy="Install it, or run `ltui join` on the other machines yourself.",
        )
    commands = [RemoteCommand(host, (*program, "--version")) for host in hosts]
    problems = []
    for host, done in zip(hosts, _run_all(commands), strict=True):
        problem = _failure(host, done, program[0])
        wanted = f"ltui {version('ltui-train')}"
        if problem is None and wanted not in done.stdout.splitlines():
            found = clean_line(done.stdout.strip().split("\n")[-1], 80) or "nothing"
            problem = Problem(
                where=host,
                what=f"`{program[0]} --version` prints {found!r} there, and node 0 has {wanted}.",
                remedy="Install the same version of ltui on every node.",
            )
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ProblemError(*problems)


def join_hosts(hosts: Sequence[str], program: Sequence[str], place: str, key: LinkKey) -> None:
    """Let the hosts join the run as nodes 1, 2, ... ``place`` is ``HOST:PORT`` of the head.

    Raise ``ProblemError`` with a sentence for each host that does not join.
    """
    commands = [
        RemoteCommand(
            host,
            (*program, "join", place, "--key-file", "-", "--node", str(number), "--detach"),
            f"{key.text}\n",
        )
        for number, host in enumerate(hosts, 1)
    ]
    failures = [
        _failure(c.host, done, program[0])
        for c, done in zip(commands, _run_all(commands), strict=True)
    ]
    if problems := [failure for failure in failures if failure is not None]:
        raise ProblemError(*problems)


def ssh_argv(command: RemoteCommand) -> list[str]:
    """Return the command line of the ssh client."""
    options = ("BatchMode=yes", "StrictHostKeyChecking=yes", f"ConnectTimeout={CONNECT_S}")
    words = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", *words, "--", command.host, shlex.join(command.words)]


def _run_all(commands: Sequence[RemoteCommand]) -> list[subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(min(_PARALLEL, len(commands))) as pool:
        return list(pool.map(_run, commands))


def _run(command: RemoteCommand) -> subprocess.CompletedProcess[str]:
    argv = ssh_argv(command)
    try:
        return subprocess.run(
            argv,
            input=command.stdin,
            env=_environment(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_S,
            check=False,
            # Ctrl-C belongs to this process, which then ends the run.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, SSH_FAILED, "", "it did not answer in time")
    except OSError as error:
        return subprocess.CompletedProcess(argv, SSH_FAILED, "", error.strerror or str(error))


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the client. It could pass variables on by its configuration."""
    return {k: v for k, v in environ.items() if k != KEY_VARIABLE}


def _failure(host: str, done: subprocess.CompletedProcess[str], program: str) -> Problem | None:
    """Return what went wrong on a host, in one sentence; None if nothing did."""
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = (
        clean_line(lines[-1].strip().rstrip("."), 200) if lines else f"exit code {done.returncode}"
    )
    if done.returncode == SSH_FAILED:
        return Problem(
            where=host,
            what=f"ssh cannot log in there ({_ssh_reason(lines) or reason}).",
            remedy=f"`ssh {host} true` must work without a question.",
        )
    if done.returncode in NOT_FOUND:
        return Problem(
            where=host,
            what=f"{program} cannot be run there ({reason}).",
            remedy="Install ltui there at the same path, or give its path: --remote-ltui PATH",
        )
    return Problem(where=host, what=f"it cannot join: {reason}.")


def _ssh_reason(lines: Sequence[str]) -> str | None:
    """Return the line of ssh that names the cause; a warning in many lines precedes some."""
    causes = (
        *("Host key verification failed", "Permission denied", "Could not resolve hostname"),
        *("Connection refused", "Connection timed out", "No route to host"),
    )
    for cause in causes:
        for line in lines:
            if cause in line:
                return clean_line(line.strip().rstrip("."), 200)
    return None
