"""Run one section of ``make gpu`` in a process of its own, so that a crash ends nothing else.

Each check is written to ``checks.jsonl`` in the folder of the section as soon as it is known, so
that a section which is killed keeps what it has measured until then.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import psutil

from tests.gpu.hardware.check import Check, Conditions
from tests.live_processes import processes_with
from tests.run_module import run_module

_MODULE = "tests.gpu.hardware.section"
_CHECKS = "checks.jsonl"
_PR_SET_PDEATHSIG = 1
"""Option of ``prctl``: the signal that a process gets when its parent ends."""
_LEAVE_S = 5.0
"""Seconds in which the processes of a section may end by themselves, as supervisors do."""


def run_section(section: str, folder: Path, *, rehearsal: bool, limit_s: float) -> list[Check]:
    """Run a section within ``limit_s`` seconds and return its checks.

    ``section``: a module with ``checks(conditions)``, an iterator of checks. Four checks are added:
    when it ran, how long, how it ended, and which processes it left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CHECKS).unlink(missing_ok=True)
    at, began = datetime.now(timezone.utc), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ltui-gpu-", ignore_cleanup_errors=True) as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LTUI_")}
        environment |= {"LTUI_HOME": home, "PYTHONUNBUFFERED": "1"}
        # Runs train in this interpreter, not in the environment that is active in the shell.
        environment.pop("VIRTUAL_ENV", None)
        arguments = [section, folder, limit_s, *(["--rehearsal"] if rehearsal else [])]
        try:
            code = run_module(_MODULE, arguments, folder / "log.txt", limit_s, environment)
            ended = f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"killed after {limit_s:g} s"
        finally:
            # Also if the command is ended: runs have sessions of their own and outlive the section.
            left = _kill(_left_after(_LEAVE_S, home))
    _append(
        folder,
        [
            Check("the section ended", ended, "exit code 0", ended == "exit code 0"),
            Check("processes left running", left, "none", not left),
            Check("began (UTC)", at.isoformat(sep=" ", timespec="seconds")),
            Check("duration of the section, s", round(time.monotonic() - began, 1)),
        ],
    )
    return read_checks(folder)


def read_checks(folder: Path) -> list[Check]:
    """Return the checks of the section in ``folder``; none if it has not run."""
    try:
        lines = (folder / _CHECKS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [Check(**json.loads(line)) for line in lines]


def _append(folder: Path, checks: Iterable[Check]) -> None:
    with (folder / _CHECKS).open("a", encoding="utf-8") as file:
        for check in checks:
            file.write(json.dumps(asdict(check), default=str) + "\n")
            file.flush()


def _left_after(seconds: float, home: str) -> list[psutil.Process]:
    """Return the processes that are left after ``seconds``, or an empty list as soon as none is."""
    deadline = time.monotonic() + seconds
    while (left := processes_with("LTUI_HOME", home)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _kill(processes: list[psutil.Process]) -> list[str]:
    """Kill the processes and return their command lines."""
    names = []
    for process in processes:
        try:
            names.append(" ".join(process.cmdline()))
            process.kill()
        except psutil.Error:
            continue
    return names


def main() -> None:
    """Run the section in this process. An exception ends it with exit code 1 and a traceback."""
    # A command that is ended by SIGKILL cannot kill its section, so the kernel has to.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("section")
    parser.add_argument("folder", type=Path)
    parser.add_argument("limit_s", type=float)
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args()
    conditions = Conditions(
        folder=options.folder.absolute(),
        home=Path(os.environ["LTUI_HOME"]),
        rehearsal=options.rehearsal,
        deadline=time.monotonic() + options.limit_s,
    )
    for check in importlib.import_module(options.section).checks(conditions):
        _append(options.folder, [check])


if __name__ == "__main__":
    main()
