"""Entry point of the supervisor process.

``python -m ltui.training.supervise.main RUN_DIR [--plan JSON | --adopt]`` detaches, acquires the
run lock, reports that it has started, and supervises the run. Heavier imports come after the fork,
so that the parent process exits within milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltui.training.supervise.node_agent import NodeAgent
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
    # What ltui writes is private. The user's commands get the umask of the process that started the
    # run, also from a supervisor that the shim starts.
    os.environ.setdefault("LTUI_RUN_UMASK", f"{os.umask(0o077):o}")
    return _supervise(arguments)


def _supervise(arguments: argparse.Namespace) -> int:
    # Imported here, so that only the detached process loads them.
    from ltui.training.lifecycle.supervisor_client import AttemptPlan
    from ltui.training.problem import Problem, ProblemError
    from ltui.training.store.run_directory import RunDir
    from ltui.training.supervise.open_attempt import open_attempt, record_failed_restart
    from ltui.training.tensor_queue.control_block import STOP_SIGNALS

    run_dir = RunDir(Path(arguments.run_dir))
    plan: AttemptPlan | None = AttemptPlan.from_text(arguments.plan)
    if arguments.adopt:
        plan = AttemptPlan(recover=True)
    supervisor: Supervisor | NodeAgent | None = None
    early_signals: list[int] = []

    def request_stop(number: int, _: object) -> None:
        """Do what ``ltui stop`` does, as soon as the next attempt has a supervisor."""
        if supervisor is None:
            early_signals.append(number)
        else:
            supervisor.request_stop(number)

    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, request_stop)
    lock: int | None = None
    while plan is not None:
        try:
            supervisor = open_attempt(run_dir, plan, lock)
        except (ProblemError, OSError) as error:
            if lock is not None:
                record_failed_restart(run_dir, plan, error)
                return 1
            if isinstance(error, OSError):
                problem = Problem(where=run_dir.id, what=f"its supervisor cannot start ({error}).")
                error = ProblemError(problem)
            print(error, file=sys.stderr, flush=True)
            problems = [problem._asdict() for problem in error.problems]
            _report(arguments.report_to, {"ok": False, "problems": problems})
            return 2
        if lock is None:
            _report(arguments.report_to, {"ok": True, "pid": os.getpid()})
        while early_signals:
            supervisor.request_stop(early_signals.pop())
        plan, lock = supervisor.run(), supervisor.live.lock
        supervisor = None
    return 0


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
    parser.add_argument("--plan", default="{}")
    parser.add_argument("--report-to", type=int)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
