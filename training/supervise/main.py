"""Entry point of the supervisor process.

``python -m ltui.training.supervise.main RUN_DIR [--resume-from PATH | --adopt]``
detaches, acquires the run lock, reports that it has started, and supervises the run. Heavier
imports come after the fork, so that the parent process exits within milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltui.training.supervise.supervisor import Supervisor


def main(argv: list[str] | None = None) -> int:
    """Supervise the run until its end is recorded. Return the exit status."""
    arguments = _arguments(argv)
    if arguments.report_to is not None:
        os.set_inheritable(arguments.report_to, False)
        if os.fork():
            os._exit(0)
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    return _supervise(arguments)


def _supervise(arguments: argparse.Namespace) -> int:
    # Imported here, so that only the detached process loads them.
    from ltui.training.lifecycle.attempt_origin import AttemptPlan
    from ltui.training.problem import Problem, ProblemError
    from ltui.training.store.run_directory import RunDir
    from ltui.training.supervise.open_attempt import open_attempt, record_failed_restart

    run_dir = RunDir(Path(arguments.run_dir))
    plan = AttemptPlan(
        recover=arguments.adopt,
        resume_from=arguments.resume_from,
        resume_step=arguments.resume_step,
        spec_path=arguments.spec,
        changes=tuple(arguments.change),
        skipped=tuple(arguments.skipped),
    )
    stop_signals = _StopSignals()
    try:
        supervisor = open_attempt(run_dir, plan)
        stop_signals.attach(supervisor)
    except (ProblemError, OSError) as error:
        if isinstance(error, OSError):
            problem = Problem(where=run_dir.id, what=f"its supervisor cannot start ({error}).")
            error = ProblemError(problem)
        print(error, file=sys.stderr, flush=True)
        problems = [dataclasses.asdict(problem) for problem in error.problems]
        _report(arguments.report_to, {"ok": False, "problems": problems})
        return 2
    _report(arguments.report_to, {"ok": True, "pid": os.getpid()})
    while (following := supervisor.run()) is not None:
        try:
            supervisor = open_attempt(run_dir, following, supervisor.lock)
            stop_signals.attach(supervisor)
        except (ProblemError, OSError) as error:
            record_failed_restart(run_dir, error)
            return 1
    return 0


class _StopSignals:
    """Translates the stop signals into a stop request, as ``ltui stop`` sends it."""

    def __init__(self) -> None:
        self._early: list[int] = []
        self._supervisor: Supervisor | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._handle)

    def attach(self, supervisor: Supervisor) -> None:
        """Send requests to ``supervisor``, including those that arrived before it existed."""
        self._supervisor = supervisor
        while self._early:
            supervisor.request_stop(self._early.pop())

    def _handle(self, number: int, _: object) -> None:
        if self._supervisor is None:
            self._early.append(number)
        else:
            self._supervisor.request_stop(number)


def _report(handle: int | None, document: dict[str, Any]) -> None:
    """Report success or failure through the pipe to the process that started this one."""
    if handle is None:
        return
    with contextlib.suppress(OSError):  # the launcher was killed; the run continues
        os.write(handle, json.dumps(document).encode() + b"\n")
    os.close(handle)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ltui-supervisor")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--adopt", action="store_true")
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--resume-step", type=int)
    parser.add_argument("--spec", type=Path)
    parser.add_argument("--change", action="append", default=[])
    parser.add_argument("--skipped", action="append", default=[])
    parser.add_argument("--report-to", type=int)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
