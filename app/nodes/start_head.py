"""Start a run on several machines as node 0, and bring the other nodes to it.

Other nodes are started with the system's ssh client. It runs in batch mode and accepts only known
host keys, so it never asks. The key of the run goes through its standard input. A remote shell
reads the command, so every word of it is quoted.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from ltui.app.nodes.launcher_key import key_of_head
from ltui.app.nodes.node_options import NodeOptions
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.nodes.link_key import KEY_FILE_NAME, KEY_VARIABLE, LinkKey
from ltui.training.nodes.node_address import format_host_and_port, link_place_path, read_link_place
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.process.python_environment import module_command
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.run_directory import RunDir, write_atomically
from ltui.widgets.sanitise import clean_line

_KILL_S = 30.0
"""Seconds to wait for the end of a run whose nodes could not be started."""
Start = Callable[[Mapping[str, str]], RunDir]
"""Start the run with these additional private files in its directory (name -> text)."""


def start_head(spec: RunSpec, options: NodeOptions, home: Path, start: Start) -> RunDir:
    """Start node 0 and, by ssh, the other nodes.

    Raise ``ProblemError`` if a node cannot be started. Then nothing is left running anywhere.
    """
    assert spec.nodes is not None
    program = remote_program(options.remote_ltui)
    if spec.nodes.start == "ssh":
        check_hosts(spec.nodes.hosts, program)
    key = _key(spec.nodes, options, home)
    # The ranks must not inherit it; the supervisor reads the file.
    os.environ.pop(KEY_VARIABLE, None)
    run_dir = start({KEY_FILE_NAME: f"{key.text}\n"})
    if spec.nodes.start == "ssh":
        try:
            join_hosts(spec.nodes.hosts, program, head_place(run_dir, spec.nodes), key)
        except BaseException:
            _end(run_dir)
            raise
    return run_dir


def _key(nodes: Nodes, options: NodeOptions, home: Path) -> LinkKey:
    path = None if options.key_file is None else Path(options.key_file)
    if nodes.start in ("srun", "launcher"):
        return key_of_head(nodes, path, home)
    if path is not None:
        return LinkKey.read_or_create(path)
    return LinkKey.from_environment(os.environ) or LinkKey.generate()


def head_place(run_dir: RunDir, nodes: Nodes) -> str:
    """Return ``HOST:PORT`` at which the other nodes join the run."""
    place = read_link_place(run_dir)
    port = nodes.control_port if place is None else place.port
    return format_host_and_port(nodes.address, port)


def join_lines(run_dir: RunDir, nodes: Nodes) -> list[str]:
    """Return what to run on the other machines."""
    others = nodes.count - 1
    key_file = shlex.quote(str(run_dir.path / KEY_FILE_NAME))
    return [
        f"{run_dir.id} waits up to {nodes.join_timeout_s:g} s for "
        + (
            "one more machine. On it, run:"
            if others == 1
            else f"{others} more machines. On each, run:"
        ),
        f"  ltui join {head_place(run_dir, nodes)} --key-file {key_file}",
        "That file is the key of the run. Unless the machines share its folder, copy it to them "
        "first, and keep it secret.",
    ]


def prepare_next_attempt(run_dir: RunDir, files: Mapping[str, str]) -> None:
    """Write the private files of a run that is resumed, and forget where its link was.

    The stored place belongs to the ports of the earlier attempt.
    """
    if lock_holder(run_dir.lock_path) is not None:
        return  # it is live, so the resume is refused
    for name, text in files.items():
        write_atomically(run_dir.path / name, text.encode())
    link_place_path(run_dir).unlink(missing_ok=True)


def _end(run_dir: RunDir) -> None:
    """Kill a run whose other nodes could not be started, and wait for its end."""
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(ProblemError):
        ControlClient(run_dir).request({"cmd": "kill"})
        while time.monotonic() < deadline and resolve_snapshot(run_dir).state in LIVE:
            time.sleep(0.1)


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
            # The configuration of the client could pass the key on.
            env={k: v for k, v in os.environ.items() if k != KEY_VARIABLE},
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
