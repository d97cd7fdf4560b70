"""The slow half of ``ltui check``: the real classes, in the interpreter that would train."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from ltui.app.launch.build_spec import LaunchRequest
from ltui.training.config.overrides import overridden_paths
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.structure_check import locate_fault
from ltui.training.config.yaml_document import Fault
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import to_json
from ltui.training.store.run_directory import ltui_home
from ltui.widgets.sanitise import clean_line

CHECK_S = 300.0
"""Importing a large project over a network file system is slow, but not that slow."""


def check_with_classes(asked: LaunchRequest) -> list[Problem]:
    """``ProblemError`` with what LightningCLI says of the configuration. Starts nothing.

    Returns what the module's source has in it that freezes ranks, though Lightning takes it.
    """
    spec = asked.spec("check", "check", time.time())
    with tempfile.TemporaryDirectory(prefix="ltui-check-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(_rank_config(spec, folder)), encoding="utf-8")
        done = _run(spec, config, install_rank_package(ltui_home()))
    if done.returncode != 0:
        raise ProblemError(*_problems(done, asked))
    return [
        Problem(where=fault.path, what=fault.what, remedy=fault.remedy)
        for line in done.stdout.splitlines()
        if (fault := _fault(line)) is not None
    ]


def _rank_config(spec: RunSpec, folder: str) -> object:
    """What a rank would be given, apart from where it saves."""
    return to_json(
        {
            "config": spec.config,
            "after_fit": list(spec.after_fit),
            "python_path": list(spec.python_path),
            "checkpoints_dir": folder,
            "cwd": spec.cwd,
        }
    )


def _run(spec: RunSpec, config: Path, rank_side: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(rank_side), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    try:
        return subprocess.run(
            [spec.python, "-m", "ltui.training.rank.train_preset", "--check", str(config)],
            cwd=spec.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        what = f"the classes were not loaded within {CHECK_S:.0f} s."
        raise ProblemError(Problem(where=spec.python, what=what)) from error


def _problems(done: subprocess.CompletedProcess[str], asked: LaunchRequest) -> list[Problem]:
    """What the check printed, or the last words of one that broke."""
    keys = overridden_paths(asked.overrides)
    found = [
        locate_fault(fault, asked.preset.where, asked.preset.lines, keys)
        for line in done.stdout.splitlines()
        if (fault := _fault(line)) is not None
    ]
    if found:
        return found
    lines = [clean_line(line, 500) for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"the check failed with exit code {done.returncode}."
    return [Problem(where=asked.preset.where, what=last)]


def _fault(line: str) -> Fault | None:
    """One line of the check's report; None for what the user's own code printed."""
    try:
        said = json.loads(line)
        where, what, remedy = said["where"], said["what"], said["remedy"]
    except (ValueError, TypeError, KeyError):
        return None
    path = "" if where == "configuration" else str(where)
    return Fault(path=path, what=clean_line(str(what), 1000), remedy=remedy and clean_line(remedy))
