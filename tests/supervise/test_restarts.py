"""Restarts without a person: from the last good checkpoint, so often, and not for ever."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from ltui.app.cli import main
from ltui.app.command_output import EXIT_DONE
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.restart_policy import (
    BEFORE_TRAINING,
    RestartHistory,
    RestartPolicy,
    read_restart_history,
    write_restart_history,
)
from ltui.training.lifecycle.resume_run import resume
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.remote_nodes import RemoteNodes
from ltui.training.supervise.stops import Stops
from ltui.training.supervise.supervisor import Supervisor
from tests.required import required
from tests.store.histories import stored_rows

from .conftest import ENGINE, Runs, stored_events


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTUI_RESTART_DELAY_S", "0.3")


def start(runs: Runs, *options: str, restarts: int) -> RunDir:
    spec = runs.spec(sys.executable, str(ENGINE), "2", *options)
    return launch(replace(spec, restarts=restarts), runs.home)


def training(runs: Runs, run: RunDir, attempt: int, step: int) -> RunSnapshot:
    return runs.until(
        run,
        lambda s: (
            s.attempt == attempt
            and s.state is RunState.RUNNING
            and len(s.ranks) == 2
            and all((r.global_step or 0) >= step for r in s.ranks)
        ),
    )


def kill_a_rank(snapshot: RunSnapshot) -> None:
    os.kill(required(snapshot.ranks[1].pid), signal.SIGKILL)


def test_a_killed_rank_is_followed_by_an_attempt_from_the_last_checkpoint(runs: Runs) -> None:
    run = start(runs, "--save-every", "10", restarts=2)
    kill_a_rank(training(runs, run, 1, 25))
    second = training(runs, run, 2, 40)
    assert required(second.restarted_because).startswith("restart 1 of 2, after: ")
    ended = runs.end(run, "stop")
    assert ended.state is RunState.STOPPED
    (waited,) = stored_events(run, "restart")
    assert waited.text.startswith("restart 1 of 2 in ")
    first, again = stored_events(run, "attempt")
    assert first.text == "Attempt 1 begins."
    assert again.data["global_step"] >= 20
    assert again.data["restarted_because"] == second.restarted_because
    rows = stored_rows(run, "attempts")
    assert [row["state"] for row in rows] == ["crashed", "stopped"]
    assert rows[1]["reason"] == second.restarted_because
    assert runs.steps(run, 0) == list(range(1, (ended.global_step or 0) + 1))


def test_resumed_with_restarts(runs: Runs) -> None:
    """``ltui resume RUN --restarts N`` of a run that was started without."""
    run = start(runs, "--save-every", "10", restarts=0)
    kill_a_rank(training(runs, run, 1, 15))
    assert runs.ended(run).state is RunState.CRASHED
    assert main(["resume", run.id, "--restarts", "1", "--detach"]) == EXIT_DONE
    kill_a_rank(training(runs, run, 2, 25))
    third = training(runs, run, 3, 30)
    assert (third.restarted_because or "").startswith("restart 1 of 1, after: ")
    assert runs.end(run, "stop").state is RunState.STOPPED
    assert run.read_spec().restarts == 1


def test_the_same_step_twice_is_enough(runs: Runs) -> None:
    run = start(runs, "--save-every", "10", "--fail-at", "25", restarts=5)
    ended = runs.ended(run)
    assert (ended.state, ended.attempt) == (RunState.FAILED, 2)
    assert "boom at last" in required(ended.detail)
    assert required(ended.detail).endswith("; not restarted: it has failed at step 25 twice")


def test_without_a_checkpoint_it_begins_anew_and_ends_when_restarts_are_used_up(runs: Runs) -> None:
    run = start(runs, restarts=1)
    kill_a_rank(training(runs, run, 1, 5))
    again = training(runs, run, 2, 15)
    assert "from the beginning" in stored_events(run, "attempt")[1].text
    kill_a_rank(again)
    ended = runs.ended(run)
    assert ended.state is RunState.CRASHED
    assert (ended.detail or "").endswith("; not restarted: 1 of 1 restarts are used up")


def end_the_wait(run: RunDir, waiting: RunSnapshot) -> None:
    """Another supervisor finds that the time has come."""
    history = read_restart_history(run)
    scheduled = replace(required(history.waiting), until_s=0.0)
    pid = required(waiting.supervisor_pid)
    os.kill(pid, signal.SIGSTOP)
    write_restart_history(run, replace(history, waiting=scheduled))
    os.kill(pid, signal.SIGKILL)


def test_the_wait_survives_the_supervisor_and_can_be_stopped(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTUI_RESTART_DELAY_S", "600")
    run = start(runs, "--save-every", "10", restarts=3)

    def waiting(number: int, *killed: int | None) -> RunSnapshot:
        words = f"restart {number} of 3 in "
        return runs.until(
            run,
            lambda s: (
                s.supervisor_pid not in (None, *killed) and (s.detail or "").startswith(words)
            ),
        )

    kill_a_rank(training(runs, run, 1, 15))
    first = waiting(1)
    assert first.state is RunState.QUEUED
    os.kill(required(first.supervisor_pid), signal.SIGKILL)
    after = waiting(1, first.supervisor_pid)
    assert after.state is RunState.QUEUED
    end_the_wait(run, after)
    # At the same step it would not be restarted again.
    kill_a_rank(training(runs, run, 2, read_restart_history(run).failed_at[-1] + 10))
    waiting(2)
    ended = runs.end(run, "stop")
    assert ended.state is RunState.STOPPED
    assert (ended.detail or "").startswith("stopped while it waited for restart 2 of 3, after: ")
    # A person begins the count anew. A kill is followed by nothing.
    resume(run)
    training(runs, run, 3, 25)
    assert read_restart_history(run) == RestartHistory()
    killed = runs.end(run, "kill")
    assert (killed.state, killed.attempt) == (RunState.STOPPED, 3)


def test_no_whole_checkpoint_is_said(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTUI_RESTART_DELAY_S", "600")
    # The ranks wait at step 15, so no checkpoint is being written when they are killed.
    gate = ("--gate", str(runs.cwd / "gate"), "--gate-at", "15")
    run = start(runs, "--save-every", "10", *gate, restarts=3)
    kill_a_rank(training(runs, run, 1, 15))
    waiting = runs.until(run, lambda s: s.state is RunState.QUEUED)
    for path in Path(run.checkpoints_dir).glob("*.ckpt"):
        path.write_bytes(b"x")
    end_the_wait(run, waiting)
    ended = runs.ended(run)
    assert ended.state is RunState.CRASHED
    assert "not restarted: none of its " in (ended.detail or "")


def test_later_each_time_and_never_more_than_asked() -> None:
    history, before = RestartHistory(), 0.0
    for step in (BEFORE_TRAINING, 3, 7):
        assert history.refusal(3, step) is None
        history = history.with_scheduled(
            attempt=1, of=3, step=step, state=RunState.CRASHED, detail="it broke"
        )
        wait_s = required(history.waiting).until_s - time.monotonic()
        assert wait_s > before
        before = wait_s
        history = history.with_started()
    assert history.refusal(3, 9) == "3 of 3 restarts are used up"
    assert history.refusal(4, 7) == "it has failed at step 7 twice"
    assert history.refusal(4, BEFORE_TRAINING) == "it has failed before its first step twice"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stop_does_not_become_a_restart_when_a_machine_is_gone(
    stopped: bool, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    spec = cast(RunSpec, SimpleNamespace(restarts=1, stall=SimpleNamespace(restarts=3)))
    restarts, stops = RestartPolicy(run, spec, 1), Stops(run, 1)
    if stopped:
        stops.stop(time.monotonic(), 60.0, False)
    live = SimpleNamespace(stops=stops, pulses={}, restarts=restarts, spec=spec)
    live.furthest_step = lambda: 100
    nodes = Mock(RemoteNodes)
    nodes.stop_signal.return_value, nodes.missing.return_value = 0, ()
    nodes.failure.return_value = "machine node1 is gone"
    Supervisor._update_nodes(cast(Supervisor, SimpleNamespace(live=live)), nodes)
    assert live.nodes_failure == "machine node1 is gone"
    assert required(stops.escalation).kill_at_once
    assert (restarts.requested is None) == stopped
