"""What the batch script of a run calls on the nodes of its job.

``python -m ltui.app.slurm.job_process STEP --run RUN --token TOKEN`` with one of these steps:

- ``prepare`` on the first node: find the run directory, or create it if this node does not see it.
- ``key``: print a new key for the connections between the nodes.
- ``node`` on every node, by srun: start the next attempt on the first node and wait until it ends.
- ``end`` on the first node: requeue the job if the run has to continue.
- ``request`` beside a running job: pass a request from standard input to the supervisor.
- ``attach`` beside a running job: open the dashboard.

Every step exits with 2 and one sentence if it cannot do its work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ltui.app.command_output import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from ltui.app.slurm.job_nodes import job_nodes, run_head, run_other_node
from ltui.app.slurm.job_submission import continue_run
from ltui.training.lifecycle.job_control import REQUEST_TIMEOUT_S
from ltui.training.lifecycle.launch_run import create_run_directory
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.nodes.link_key import LinkKey
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import JobOptions
from ltui.training.slurm.job_record import JobRecord, read_record, write_submission
from ltui.training.store.history_place import own_folder
from ltui.training.store.run_directory import (
    RunDir,
    ltui_home,
    make_private_folders,
    private_folder,
)
from ltui.training.store.spec_file import parse_spec


def main(argv: list[str] | None = None) -> int:
    """Run one step of the batch script and return its exit code."""
    arguments = _arguments(argv)
    try:
        if arguments.step == "prepare":
            prepare(arguments.run, arguments.token, sys.stdin.read())
            return EXIT_DONE
        if arguments.step == "key":
            print(LinkKey.generate().text)
            return EXIT_DONE
        if arguments.step == "node" and (nodes := job_nodes(os.environ)) is not None and nodes.rank:
            return run_other_node(nodes, local_home())
        run_dir = find_recorded(arguments.run, arguments.token)
        if arguments.step == "node":
            return run_head(run_dir)
        if arguments.step == "request":
            print(json.dumps(answer(run_dir, json.loads(sys.stdin.read()))))
            return EXIT_DONE
        if arguments.step == "attach":
            return attach(run_dir, readonly=arguments.readonly)
        return continue_run(run_dir, arguments.code)
    except ProblemError as error:
        for problem in error.problems:
            print(f"ltui: {problem}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT


def prepare(run_id: str, token: str, spec_text: str) -> RunDir:
    """Return the directory of the run on this node. Raises ``ProblemError``.

    If the node does not see the directory that ``ltui submit`` made, a new one is created from the
    specification in the batch script.
    """
    run_dir = _recorded(run_id, token)
    if run_dir is not None:
        return run_dir
    run_dir = RunDir(_homes()[0] / "runs" / run_id)
    if run_dir.path.exists():
        raise ProblemError.of(
            where=str(run_dir.path), what="this directory belongs to another run of that name."
        )
    spec = parse_spec(spec_text, "the batch script")
    if spec.freeze:
        raise ProblemError.of(
            where=run_id,
            what="this node does not see the directory of the run, which has its frozen code.",
            remedy="Set LTUI_HOME to a folder that the nodes see, or submit it with --no-freeze.",
        )
    create_run_directory(run_dir, spec)
    record = JobRecord(
        token=token,
        submitted_at=time.time(),
        options=JobOptions(nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))),
        first_job_id=os.environ.get("SLURM_JOB_ID"),
        private=True,
    )
    write_submission(run_dir, record)
    print(
        f"ltui: this node does not see the directory in which the run was submitted; the run is in "
        f"{run_dir.path} on this node.",
        flush=True,
    )
    return run_dir


def find_recorded(run_id: str, token: str) -> RunDir:
    """Return the directory that ``prepare`` found or created. Raises ``ProblemError``."""
    run_dir = _recorded(run_id, token)
    if run_dir is None:
        raise ProblemError.of(
            where=run_id,
            what="the first node has no directory of this run.",
            remedy="The batch script has to run on the first node of the job.",
        )
    return run_dir


def _recorded(run_id: str, token: str) -> RunDir | None:
    for home in _homes():
        run_dir = RunDir(home / "runs" / run_id)
        record = read_record(run_dir)
        if record is not None and record.token == token:
            return run_dir
    return None


def _homes() -> list[Path]:
    """Return the home directories that a run may be in on this node, the preferred one first.

    ``$LTUI_HOME`` of the login node may not exist here, or may be read-only.
    """
    homes = []
    with contextlib.suppress(ProblemError):
        homes.append(ltui_home())
    try:
        homes.append(local_home())
    except ProblemError:
        if not homes:
            raise
    return homes


def local_home() -> Path:
    """Return a folder on a disk of this machine, for this user alone. Raises ``ProblemError``."""
    remedy = "Set LTUI_HOME to a folder that the nodes can write, and TMPDIR to one of the node."
    parent = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    with contextlib.suppress(OSError):  # the next line says why
        make_private_folders(parent)
    local = private_folder(own_folder(parent), remedy)
    private_folder(local / "runs", remedy)
    return local


def answer(run_dir: RunDir, request: dict[str, Any]) -> dict[str, Any]:
    """Return the supervisor's answer, or the problem in words."""
    try:
        return ControlClient(run_dir).request(request, REQUEST_TIMEOUT_S)
    except ProblemError as error:
        return {"problem": error.problems[0].what}


def attach(run_dir: RunDir, *, readonly: bool) -> int:
    """Open the dashboard at the run. Return its exit code."""
    # Imported here: the other steps do not need Textual.
    from ltui.app.open_dashboard import run_dashboard

    return run_dashboard(run_dir.home, run=run_dir, readonly=readonly)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ltui-slurm")
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("key")
    for name in ("prepare", "node", "end", "request", "attach"):
        step = steps.add_parser(name)
        step.add_argument("--run", required=True)
        step.add_argument("--token", required=True)
        if name == "attach":
            step.add_argument("--readonly", action="store_true")
        if name == "end":
            step.add_argument("--code", type=int, default=EXIT_FAILED)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
