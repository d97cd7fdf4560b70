"""A resume from an older step: what counts of the run, and how its start is shown."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.app.command_output import EXIT_DONE
from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.state.good_checkpoints import newest_checkpoint
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_checkpoints import choose_checkpoint
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.supervise.conftest import Runs


def losses(run: RunDir) -> dict[int, float]:
    """Return the exported loss of each step."""
    with RunStore(run) as store:
        rows = list(store.export(["train/loss"], [0]))
    return {row.step: row.value for row in rows if row.value is not None}


def assert_values(shown: RunSnapshot, expected: dict[int, float]) -> None:
    loss = shown.metrics["train/loss"]
    assert (loss.best_min, loss.best_max) == (min(expected.values()), max(expected.values()))
    assert (loss.step, loss.last) == (max(expected), expected[max(expected)])


def test_only_the_steps_that_the_run_still_has_count(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    options = ("--save-every", "20", "--pause", "0.01", "--gate", str(gate), "--gate-at", "20")
    run = runs.training(*options, step=20)
    runs.order(run, "stop_when", conditions=[{"kind": "step", "step": 45}])
    gate.touch()
    stopped = runs.ended(run)
    every = losses(run)
    assert_values(stopped, every)

    # It waits at its first step, and is then killed: nothing is replaced in the end.
    gate.unlink()
    assert main(["resume", run.id, "--from", "20", "--detach"]) == EXIT_DONE
    sentence = f"Steps 21 to {max(every)} are then no longer part of the run's curves."
    assert sentence in capsys.readouterr().err
    second = runs.until(run, lambda s: s.attempt == 2 and s.ranks)
    assert_values(second, {step: loss for step, loss in every.items() if step <= 20})
    assert required(newest_checkpoint(second.checkpoints)).global_step == 20
    killed = runs.end(run, "kill")
    assert_values(killed, every)
    assert not any(c.superseded for c in killed.checkpoints)

    older = next(c for c in killed.checkpoints if c.global_step == 20)
    resume(run, checkpoint=Path(older.path))
    runs.until(run, lambda s: s.attempt == 3 and s.ranks)
    runs.order(run, "stop_when", conditions=[{"kind": "step", "step": 30}])
    gate.touch()
    third = runs.ended(run)
    assert_values(third, losses(run))
    assert max(losses(run)) == 30
    newest = required(newest_checkpoint(third.checkpoints))
    assert newest.path == required(choose_checkpoint(run.checkpoints_dir).taken).path
    assert newest.global_step == 30
    assert {c.global_step for c in third.checkpoints if c.superseded} == {40, max(every)}


def test_a_resumed_command_is_starting_until_it_trains_and_accepts_a_stop_at_a_step(
    runs: Runs, tmp_path: Path
) -> None:
    """Its import may take a minute, and it has shown before what it can do."""
    gate = tmp_path / "gate"
    wait = f'[ "$LTUI_ATTEMPT" = 1 ] || while [ ! -e {gate} ]; do sleep 0.05; done'
    run = runs.start("sh", "-c", f"{wait}; exec {shlex.join(runs.fake_command())}")
    runs.until(run, lambda s: (s.global_step or 0) >= 5)
    runs.end(run, "stop")

    resume(run)
    begun = time.monotonic()
    # A command that has never trained counts as running after 6 s.
    while time.monotonic() < begun + 8:
        shown = runs.until(run, lambda s: s.attempt == 2)
        assert shown.state is RunState.STARTING
        assert "no steps" not in (shown.detail or "")
        time.sleep(0.5)
    with pytest.raises(ProblemError, match="have not begun to train yet"):
        runs.order(run, "checkpoint")
    goal = (shown.global_step or 0) + 7
    request = {"cmd": "stop_when", "conditions": [{"kind": "step", "step": goal}]}
    answer = ControlClient(run).request(request)
    assert answer["stops"] == [f"at step {goal}"]
    gate.touch()
    assert runs.ended(run).global_step == goal
