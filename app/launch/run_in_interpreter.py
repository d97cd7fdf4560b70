"""Run a program of the rank package in the training interpreter, and read what it reports.

Such a program prints one JSON object per line (``training/data/ffcv/beton_script.py``). This
process imports neither torch nor FFCV.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.python_command import module_command
from ltui.training.store.run_directory import ltui_home
from ltui.widgets.sanitise import clean_line

_UNWIND_S = 20.0
"""Seconds for the program to remove its files after SIGTERM."""


def run_program(
    python: str, module: str, request: Mapping[str, Any], on_line: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run ``module`` and return its result. ``on_line`` gets each line that is neither a problem
    nor the result.

    Raises ``ProblemError`` with the problems that the program reports, or with its last line of
    errors if it fails. Ctrl-C ends the program and waits for it, because it has files to remove.
    """
    problems: list[Problem] = []
    result: dict[str, Any] | None = None
    # A file, because a program that fills a pipe waits until it is read.
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            module_command(module, json.dumps(request), python=python),
            env=rank_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            # In its own session, so that Ctrl-C reaches it once, through this process.
            start_new_session=True,
        )
        try:
            for line in process.stdout or ():
                message = _decode_line(line)
                if "problem" in message:
                    problems.append(_parse_problem(message["problem"]))
                elif "result" in message:
                    result = message["result"]
                else:
                    on_line(message)
            process.wait()
        finally:
            _terminate(process)
        errors.seek(0)
        last = next((line.strip() for line in reversed(list(errors)) if line.strip()), "")
    if problems:
        raise ProblemError(*problems)
    if result is None:
        text = last or f"the program failed with exit code {process.returncode}."
        raise ProblemError.of(where=python, what=clean_line(text, 500))
    return result


def rank_environment() -> dict[str, str]:
    """Return the environment of this process with the rank package on ``PYTHONPATH``."""
    paths = [str(install_rank_package(ltui_home())), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def _terminate(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_UNWIND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _decode_line(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _parse_problem(document: Mapping[str, Any]) -> Problem:
    remedy = document.get("remedy")
    return Problem(
        where=clean_line(str(document.get("where")), 500),
        what=clean_line(str(document.get("what")), 1000),
        remedy=clean_line(str(remedy)) if remedy else None,
    )
