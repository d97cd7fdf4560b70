"""Starting a supervisor: for a new run, for another attempt of one, for one that lost its own.

People wait for the first training step, so nothing that is imported here is heavy.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ltui.training.lifecycle.shim_files import shim_identity
from ltui.training.lifecycle.start_checks import failure_reason
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.store.run_directory import RunDir, open_private_log, write_atomically

START_S = 30.0
"""Seconds that a supervisor gets until it reports, and a keeper until it has started another."""


def adopt(run_dir: RunDir) -> None:
    """Start a supervisor for a run that lost its own; does nothing where one is alive."""
    if lock_holder(run_dir.lock_path) is None:
        start_supervisor(run_dir, ("--adopt",), _kept_environment(run_dir))


def save_environment(run_dir: RunDir) -> None:
    """Write down what a run that waits for GPUs is to be started with, for whoever takes it up."""
    if not run_dir.environment_path.exists():
        write_atomically(run_dir.environment_path, json.dumps(dict(os.environ)).encode())


def _kept_environment(run_dir: RunDir) -> dict[str, str] | None:
    try:
        document = json.loads(run_dir.environment_path.read_text())
    except (OSError, ValueError):
        return None
    return {str(k): str(v) for k, v in document.items()} if isinstance(document, dict) else None


def shim_restarts_supervisor(run_dir: RunDir) -> bool:
    """Whether a run whose supervisor was killed as it began has a keeper, which starts another."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        shim = shim_identity(run_dir)
        if shim is None or not shim.alive():
            return False
        if lock_holder(run_dir.lock_path) is not None:
            return True
        time.sleep(0.05)
    return False


def supervisor_argv(run_dir: RunDir, *arguments: str) -> list[str]:
    """The command line of a run's supervisor."""
    return [sys.executable, "-m", "ltui.training.supervise.main", str(run_dir.path), *arguments]


def start_supervisor(
    run_dir: RunDir, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """Start it detached, in ``environment`` or this one, and wait for its first word."""
    given = os.environ if environment is None else environment
    read_end, write_end = os.pipe()
    environ = {k: v for k, v in given.items() if not k.startswith("LTUI_RUN_")}
    try:
        with open_private_log(run_dir.supervisor_log_path) as log:
            starter = subprocess.Popen(
                supervisor_argv(run_dir, *arguments, "--report-to", str(write_end)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=run_dir.path,
                env=environ,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        os.close(write_end)
        write_end = -1
        answer = _first_line(read_end, time.monotonic() + START_S)
        starter.wait(5.0)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProblemError(_no_supervisor(run_dir, failure_reason(error))) from error
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    if answer is None:
        raise SupervisorKilledError(_no_supervisor(run_dir, _last_words(run_dir)))
    if not answer.get("ok"):
        raise ProblemError(*(Problem(**problem) for problem in answer["problems"]))


def _first_line(read_end: int, deadline: float) -> dict[str, Any] | None:
    """The report, or None where the pipe closes or falls silent without one."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(read_end, 65536) if ready else b""
        if not data:
            return None
        text += data
    answer = json.loads(text)
    return answer if isinstance(answer, dict) else None


class SupervisorKilledError(ProblemError):
    """The supervisor ended without a report."""


def _no_supervisor(run_dir: RunDir, reason: str) -> Problem:
    return Problem(where=run_dir.id, what=f"its supervisor could not be started ({reason}).")


def _last_words(run_dir: RunDir) -> str:
    try:
        lines = run_dir.supervisor_log_path.read_text(errors="replace").strip().split("\n")
    except OSError:
        lines = [""]
    return lines[-1] or "no reason was given"
