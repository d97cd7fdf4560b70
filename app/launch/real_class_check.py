"""The slow part of ``ltui check``: load the real classes in the training interpreter."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

from ltui.app.launch.build_spec import LaunchRequest
from ltui.app.launch.run_in_interpreter import rank_environment
from ltui.training.config.preflight import overridden_paths
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.structure_check import locate_fault
from ltui.training.config.yaml_document import Fault
from ltui.training.json_codec import to_json
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.python_command import module_command
from ltui.widgets.sanitise import clean_line

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
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(_rank_config(spec, folder)), encoding="utf-8")
        process = _run_check(spec, config)
    if process.returncode != 0:
        raise ProblemError(*_reported_problems(process, request))
    return [
        Problem(where=fault.path, what=fault.what, remedy=fault.remedy)
        for line in process.stdout.splitlines()
        if (fault := _parse_fault(line)) is not None
    ]


def _rank_config(spec: RunSpec, folder: str) -> object:
    """Return the document that a rank would get, except for the checkpoint folder."""
    return to_json(
        {
            "config": spec.config,
            "after_fit": list(spec.after_fit),
            "python_path": list(spec.python_path),
            "checkpoints_dir": folder,
            "cwd": spec.cwd,
        }
    )


def _run_check(spec: RunSpec, config: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            module_command(
                "ltui.training.rank.train_preset", "--check", str(config), python=spec.python
            ),
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
        message_text = f"the classes were not loaded within {CHECK_S:.0f} s."
        raise ProblemError.of(where=spec.python, what=message_text) from error


def _reported_problems(
    process: subprocess.CompletedProcess[str], request: LaunchRequest
) -> list[Problem]:
    """Return the problems that the check printed, or the last line of errors if the check itself
    failed."""
    keys = overridden_paths(request.overrides)
    problems = [
        locate_fault(fault, request.preset.where, request.preset.lines, keys)
        for line in process.stdout.splitlines()
        if (fault := _parse_fault(line)) is not None
    ]
    if problems:
        return problems
    lines = [clean_line(line, 500) for line in process.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"the check failed with exit code {process.returncode}."
    return [Problem(where=request.preset.where, what=last)]


def _parse_fault(line: str) -> Fault | None:
    """Return one line of the check's report, or None if the user's code printed the line."""
    try:
        message = json.loads(line)
        where, what, remedy = message["where"], message["what"], message["remedy"]
    except (ValueError, TypeError, KeyError):
        return None
    path = "" if where == "configuration" else str(where)
    return Fault(path=path, what=clean_line(str(what), 1000), remedy=remedy and clean_line(remedy))
