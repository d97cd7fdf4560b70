"""Failures of the surroundings: a read-only home, a terminal that disappears, a full disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.chaos.conftest import Command, everywhere
from tests.chaos.invariants import leftover_files, verify_checkpoints
from tests.cli.terminal import Terminal
from tests.small_disk import fill, mount, unmount
from tests.supervise.conftest import Runs, stored_events

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")


@everywhere
@as_root
def test_a_home_that_can_only_be_read(runs: Runs, ltui: Command, saved_run: RunDir) -> None:
    run = saved_run
    stopped = runs.end(run, "stop")
    mount("--bind", str(runs.home), str(runs.home))
    try:
        mount("-o", "remount,ro,bind", str(runs.home))
        shown = ltui.show(run)
        assert (shown["state"], shown["global_step"]) == ("stopped", stopped.global_step)
        assert run.id in ltui("runs")
        assert "engine begins" in ltui("logs", run.id)
        assert "train/loss" in ltui("export", run.id, "--format", "csv")
        for words in (("resume", run.id), ("delete", run.id), ("exec", "--", "true")):
            output = ltui(*words, code=2)
            assert "cannot be written" in output, output
            assert len(output.strip().splitlines()) == 1, output
    finally:
        unmount(runs.home)
    assert resolve_snapshot(run).state is RunState.STOPPED


@pytest.mark.parametrize("nohup", [False, pytest.param(True, marks=everywhere)])
def test_the_terminal_goes_and_the_run_does_not(
    runs: Runs, ltui: Command, saved_run: RunDir, nohup: bool
) -> None:
    """Under nohup no signal arrives, but reading and writing the terminal fails."""
    argv = ltui.argv("attach", saved_run.id)
    if nohup:
        argv = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *argv]
    dashboard = Terminal(argv, ltui.cwd, ltui.environ)
    try:
        dashboard.wait_for("step")
        dashboard.hang_up()
        dashboard.process.wait(90)
    finally:
        dashboard.close()
    runs.more_steps(saved_run, 10)
    runs.end(saved_run, "kill")


@everywhere
def test_two_dashboards_on_one_run(runs: Runs, ltui: Command, saved_run: RunDir) -> None:
    argv = ltui.argv("attach", saved_run.id)
    dashboard, other = (Terminal(argv, ltui.cwd, ltui.environ) for _ in range(2))
    try:
        dashboard.wait_for("step")
        other.wait_for("step")
        other.process.send_signal(signal.SIGKILL)
        other.wait()
        runs.more_steps(saved_run, 10)
        assert dashboard.process.poll() is None
        runs.order(saved_run, "stop")
        dashboard.wait_for("stopped")
        ended = runs.ended(saved_run)
    finally:
        dashboard.close()
        other.close()
    assert runs.steps(saved_run) == list(range(1, (ended.global_step or 0) + 1))


@everywhere
@as_root
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    runs: Runs, small_disk: Callable[..., Path]
) -> None:
    disk = small_disk(48)
    engine = runs.fake_command("--save-every", "10", "--size", "500000")
    run = launch(runs.spec(*engine), disk)
    runs.until(run, lambda s: verify_checkpoints(run).last is not None)
    good = len(verify_checkpoints(run).complete)
    ballast = fill(disk)
    runs.until(run, lambda s: s.history_note is not None)
    on = runs.more_steps(run, 40)
    assert on.state is RunState.RUNNING
    assert verify_checkpoints(run).complete, "the checkpoints from before are still there"
    assert not verify_checkpoints(run).broken
    ballast.unlink()
    runs.until(run, lambda s: s.history_note is None)
    step = resolve_snapshot(run).global_step or 0
    runs.until(
        run,
        lambda s: (verify_checkpoints(run).last or {"global_step": 0})["global_step"] > step,
    )
    assert good <= 3
    ended = runs.end(run, "stop")
    assert ended.state is RunState.STOPPED
    assert leftover_files(run) == {}
    failed = stored_events(run, "checkpoint_failed")
    assert "MB free" in failed[0].text
    assert runs.steps(run) == list(range(1, (ended.global_step or 0) + 1))
