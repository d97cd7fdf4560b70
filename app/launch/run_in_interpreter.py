"""Run a program of the rank package in the training interpreter, and read what it reports.

Such a program prints one JSON object per line (``training/data/ffcv/beton_script.py``). This
process imports neither torch nor FFCV. The slow part of ``ltui check`` is such a program, too: it
loads the real classes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltui.training.config.preflight import overridden_paths
from ltui.training.config.structure_check import locate_fault
from ltui.training.config.yaml_document import Fault
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.python_environment import module_command
from ltui.training.store.run_directory import ltui_home
from ltui.widgets.sanitise import clean_line

if TYPE_CHECKING:
    from ltui.app.launch.build_spec import LaunchRequest

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


CHECK_S = 300.0
"""Seconds for the check. Importing a large project over a network file system is slow, but not
that slow."""


def check_with_classes(request: LaunchRequest) -> list[Problem]:
    """Check the configuration with LightningCLI, without starting a run.

    Raises ``ProblemError`` with the errors that LightningCLI reports. Returns warnings about code
    of the module that Lightning accepts but that freezes ranks.
    """
    spec = request.spec("check", "check", time.time())
    with tempfile.TemporaryDirectory(prefix="ltui-check-") as folder:
        # The document that a rank would get, except for the checkpoint folder.
        document = {
            "config": spec.config,
            "after_fit": spec.after_fit,
            "python_path": spec.python_path,
            "checkpoints_dir": folder,
            "cwd": spec.cwd,
        }
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(to_json(document)), encoding="utf-8")
        program = ("ltui.training.rank.train_preset", "--check", str(config))
        try:
            process = subprocess.run(
                module_command(*program, python=spec.python),
                cwd=spec.cwd,
                env=rank_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            message = f"the classes were not loaded within {CHECK_S:.0f} s."
            raise ProblemError.of(where=spec.python, what=message) from error
    # The user's code may print other lines.
    lines = map(_decode_line, process.stdout.splitlines())
    reported = [_parse_problem(line) for line in lines if {"where", "what", "remedy"} <= {*line}]
    faults = [
        Fault(path="" if p.where == "configuration" else p.where, what=p.what, remedy=p.remedy)
        for p in reported
    ]
    if process.returncode == 0:
        return [Problem(where=fault.path, what=fault.what, remedy=fault.remedy) for fault in faults]
    preset, keys = request.preset, overridden_paths(request.overrides)
    problems = [locate_fault(fault, preset.where, preset.lines, keys) for fault in faults]
    if not problems:
        errors = [line for line in process.stderr.splitlines() if line.strip()]
        last = errors[-1] if errors else f"the check failed with exit code {process.returncode}."
        problems = [Problem(where=preset.where, what=clean_line(last, 500))]
    raise ProblemError(*problems)
