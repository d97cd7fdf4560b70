"""The state of a run whose supervisor only starts, and which processes are the run's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle import run_status
from ltui.training.lifecycle.run_processes import shim_identity
from ltui.training.lifecycle.run_status import resolve_here
from ltui.training.lifecycle.supervisor_client import STILL_STARTING, AttemptPlan
from ltui.training.problem import ProblemError
from ltui.training.process import identity
from ltui.training.process.identity import boot_id, identify, start_ticks
from ltui.training.process.proc_files import command_line
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir, write_json
from ltui.training.supervise.open_attempt import open_attempt
from tests.waiting import wait_for


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose engine has been started, and which has no history yet."""
    run = RunDir(tmp_path / "runs" / "brave-owl-0001")
    (run.path / "engine").mkdir(parents=True)
    run.write_spec(
        RunSpec(id=run.id, name="owl", created_at=1.0, cwd="/", python="python3", nproc=1)
    )
    write_json(run.engine_start_path(1), {})
    return run


@pytest.fixture
def process(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ["ltui.training.supervise.main", str(run.path)]
    process = subprocess.Popen([sys.executable, "-c", "input()", *arguments], stdin=subprocess.PIPE)
    # The kernel sets its command line some moments after Popen returns.
    wait_for(lambda: set(arguments) <= set(command_line(process.pid)))
    yield process
    process.kill()
    process.communicate()


def test_a_supervisor_is_starting_until_it_answers(
    run: RunDir, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_here(run).detail == STILL_STARTING

    run.lock_path.touch()
    inodes = f"{run.lock_path.stat().st_ino}\n{run.path.stat().st_ino}"
    run.lock_path.write_text(f"{process.pid}\n{start_ticks(process.pid)}\n{boot_id()}\n{inodes}\n")
    starting = resolve_here(run)
    assert (starting.detail, starting.history_note) == (STILL_STARTING, None)

    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: "does not answer" in str(resolve_here(run).detail))
    os.kill(process.pid, signal.SIGCONT)
    monkeypatch.setattr(identity, "STARTING_S", 0.0)
    late = resolve_here(run)
    assert "does not answer" in str(late.detail)
    assert late.history_note is not None


@pytest.mark.parametrize("state", [RunState.QUEUED, RunState.STARTING])
def test_a_recovered_run_that_goes_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: RunState
) -> None:
    this_process = identify(os.getpid())
    for name, result in {
        "is_abandoned": True,
        "lock_holder": this_process,
        "has_live_shim": state is RunState.STARTING,
        "resolve_snapshot": RunSnapshot(id="a", name="a", state=state),
    }.items():
        monkeypatch.setattr(run_status, name, lambda _, result=result: result, raising=False)
    monkeypatch.setattr(run_status, "restart_supervisor", lambda _: None)
    began_s = time.monotonic()
    assert run_status.recover_run(RunDir(tmp_path), 20.0)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [
        ({}, True),
        ({"start_ticks": 0}, False),
        ({"boot_id": None}, False),
        ({"boot_id": "another boot"}, False),
        ({"pid": "1"}, False),
    ],
)
def test_a_given_run_cannot_name_any_process_as_its_own(
    run: RunDir, changes: dict[str, object], is_known: bool
) -> None:
    pid = os.getpid()
    document = {"pid": pid, "start_ticks": start_ticks(pid), "boot_id": boot_id(), "attempt": 1}
    write_json(run.shim_path, {**document, **changes})
    assert (shim_identity(run) is not None) is is_known


def test_a_run_that_was_just_recovered_is_not_recovered_again(run: RunDir) -> None:
    """Of two clients that find it abandoned, the second comes when its end is recorded."""
    run.lock_path.touch()  # as a supervisor leaves it
    with pytest.raises(ProblemError, match="its end is already recorded"):
        open_attempt(run, AttemptPlan(recover=True))
    assert not run.db_path.exists()
