"""A disk that fills up under a run: training goes on, what is missing is said, then made up for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.run_status import current_snapshot, resolve_snapshot
from ltui.training.state.run_snapshot import LIVE, RunState
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
    ended = runs.end(run, "stop")
    assert ended.state is RunState.STOPPED
    assert runs.has_all_steps(run, ended.global_step)


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


@pytest.mark.slow
def test_an_end_that_finds_no_room_is_recorded_by_a_later_command(
    runs: Runs, small_disk: Path
) -> None:
    """The supervisor waits a minute for room, then it leaves."""
    gate = runs.cwd / "gate"
    run = _start(runs, small_disk, "--steps", "150", "--gate", str(gate), "--gate-at", "20")
    ballast = fill(small_disk)
    gate.touch()
    runs.until(run, lambda s: s.state is RunState.FINISHED)
    runs.until_alone(run, seconds=150)
    full = [resolve_snapshot(run) for _ in range(2)]
    assert full[0].state is RunState.FINISHED
    assert full[0].elapsed_s == full[1].elapsed_s
    assert "not recorded" in required(full[0].history_note)
    ballast.unlink()
    ended = current_snapshot(run)
    assert (ended.state, ended.history_note) == (RunState.FINISHED, None)
    assert runs.steps(run) == list(range(1, 151))


def test_a_stop_that_could_not_save_leaves_the_run_running(runs: Runs, small_disk: Path) -> None:
    run = _start(runs, small_disk)
    ballast = fill(small_disk)
    runs.order(run, "stop")
    refused = runs.until(run, lambda s: (s.detail or "").startswith("not stopped: "))
    goal = required(refused.global_step) + 20
    on = runs.until(run, lambda s: (s.global_step or 0) > goal)
    assert on.state is RunState.RUNNING
    ballast.unlink()
    runs.order(run, "checkpoint")
    runs.until(run, lambda s: s.checkpoints and s.detail is None)
    assert runs.end(run, "stop").state is RunState.STOPPED


def test_a_checkpoint_that_cannot_be_saved_says_why_at_once(
    runs: Runs,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The event of the failure cannot be stored either."""
    monkeypatch.setenv("LTUI_HOME", str(small_disk))
    run = _start(runs, small_disk)
    ballast = fill(small_disk)
    assert main(["checkpoint", run.id]) == EXIT_FAILED
    assert f"{run.id}: not saved: " in capsys.readouterr().out
    ballast.unlink()
    runs.until(run, lambda s: s.history_note is None)
    assert main(["checkpoint", run.id]) == EXIT_DONE
    assert runs.until(run, lambda s: not (s.detail or "").startswith("not saved"))
    runs.end(run, "stop")


def test_a_program_that_dies_of_the_full_disk_is_said_to(runs: Runs, small_disk: Path) -> None:
    printing = "while True: print('step', 'x' * 4000, flush=True)"
    run = launch(runs.spec(sys.executable, "-c", printing), small_disk)
    ended = runs.until(run, lambda s: s.state not in LIVE)
    assert ended.state is RunState.FAILED
    assert required(ended.detail).startswith(f"the disk of {run.path} is full; the command exited")
    (warning,) = ended.cautions
    assert "MB are free on the disk of" in warning.what
    for log in run.logs_dir(1).glob("*.log"):
        log.unlink()
    runs.until_alone(run)


def test_a_stop_on_a_disk_that_has_no_room_for_a_file(runs: Runs, tmp_path: Path) -> None:
    """The shim learns all the same that the end is recorded, and no supervisor judges it again."""
    disk = tmp_path / "files"
    mount_small_disk(disk, 40, most_files=400)
    try:
        (disk / "runs").mkdir()
        run = launch(runs.spec("sleep", "300"), disk)
        runs.until(run, lambda s: s.state is RunState.RUNNING)
        with contextlib.suppress(OSError):
            for number in range(400):
                (disk / str(number)).touch()
        runs.end(run, "stop")
        assert run.engine_final_path(1).exists()
        assert resolve_snapshot(run).state is RunState.STOPPED
    finally:
        unmount(disk)
