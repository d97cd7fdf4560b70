"""A disk that fills up under a run: training goes on, what is missing is said, then made up for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltui.training.lifecycle.launch_run import launch
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.small_disk import fill, mount_small_disk, unmount
from tests.supervise.conftest import Runs

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    mount_small_disk(disk, 40)
    (disk / "runs").mkdir()
    yield disk
    unmount(disk)


def _start(runs: Runs, disk: Path, *options: str) -> RunDir:
    run = launch(runs.spec(*runs.fake_command(*options)), disk)
    runs.until(run, lambda s: (s.global_step or 0) > 5)
    return run


def test_history_catches_up_once_there_is_room(runs: Runs, small_disk: Path) -> None:
    run = _start(runs, small_disk)
    ballast = fill(small_disk)
    full = runs.until(run, lambda s: s.history_note is not None)
    assert full.state is RunState.RUNNING
    assert required(full.history_note).startswith("disk full since ")
    goal = required(full.global_step) + 50
    on = runs.until(run, lambda s: (s.global_step or 0) > goal)
    assert "step records not written" in required(on.history_note)
    ballast.unlink()
    runs.until(run, lambda s: s.history_note is None)
    runs.order(run, "stop")
    ended = runs.ended(run)
    assert ended.state is RunState.STOPPED
    assert (
        runs.steps(run, 0) == runs.steps(run, 1) == list(range(1, required(ended.global_step) + 1))
    )


def test_the_end_is_recorded_once_there_is_room(runs: Runs, small_disk: Path) -> None:
    gate = runs.cwd / "gate"
    run = _start(runs, small_disk, "--steps", "150", "--gate", str(gate), "--gate-at", "20")
    ballast = fill(small_disk)
    gate.touch()
    ended = runs.until(run, lambda s: s.state is RunState.FINISHED)
    assert ended.history_note is not None
    assert runs.processes(run), "the supervisor left without having written the end"
    ballast.unlink()
    runs.until_alone(run)
    assert runs.ended(run).history_note is None
    assert runs.steps(run) == list(range(1, 151))
