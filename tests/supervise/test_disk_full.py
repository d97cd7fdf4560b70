"""A disk that fills up under a run: training goes on, what is missing is said, then made up for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.run_status import current_snapshot, resolve_snapshot
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.small_disk import fill
from tests.supervise.conftest import Runs

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
Mount = Callable[..., Path]


def _start(runs: Runs, disk: Path, *options: str) -> RunDir:
    run = launch(runs.spec(*runs.fake_command(*options)), disk)
    runs.until(run, lambda s: (s.global_step or 0) > 5)
    return run


def test_training_goes_on_and_history_and_checkpoints_follow_once_there_is_room(
    runs: Runs, small_disk: Mount
) -> None:
    """Also after a stop that could not save."""
    run = _start(runs, small_disk(40))
    ballast = fill(run.home)
    full = runs.until(run, lambda s: s.history_note is not None)
    assert full.state is RunState.RUNNING
    assert required(full.history_note).startswith("disk full since ")
    on = runs.more_steps(run, 50)
    assert "step records not written" in required(on.history_note)
    runs.order(run, "stop")
    runs.until(run, lambda s: (s.detail or "").startswith("not stopped: "))
    assert runs.more_steps(run).state is RunState.RUNNING
    ballast.unlink()
    runs.until(run, lambda s: s.history_note is None)
    runs.order(run, "checkpoint")
    runs.until(run, lambda s: s.checkpoints and s.detail is None)
    ended = runs.end(run, "stop")
    assert ended.state is RunState.STOPPED
    assert runs.has_all_steps(run, ended.global_step)


def test_the_end_is_recorded_once_there_is_room(runs: Runs, small_disk: Mount) -> None:
    gate = runs.cwd / "gate"
    run = _start(runs, small_disk(40), "--steps", "150", "--gate", str(gate), "--gate-at", "20")
    ballast = fill(run.home)
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
    runs: Runs, small_disk: Mount
) -> None:
    """The supervisor waits a minute for room, then it leaves."""
    gate = runs.cwd / "gate"
    run = _start(runs, small_disk(40), "--steps", "150", "--gate", str(gate), "--gate-at", "20")
    ballast = fill(run.home)
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


def test_a_checkpoint_that_cannot_be_saved_says_why_at_once(
    runs: Runs,
    small_disk: Mount,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The event of the failure cannot be stored either."""
    run = _start(runs, small_disk(40))
    monkeypatch.setenv("LTUI_HOME", str(run.home))
    ballast = fill(run.home)
    assert main(["checkpoint", run.id]) == EXIT_FAILED
    assert f"{run.id}: not saved: " in capsys.readouterr().out
    ballast.unlink()
    runs.until(run, lambda s: s.history_note is None)
    assert main(["checkpoint", run.id]) == EXIT_DONE
    runs.until(run, lambda s: not (s.detail or "").startswith("not saved"))
    runs.end(run, "stop")


def test_a_program_that_dies_of_the_full_disk_is_said_to(runs: Runs, small_disk: Mount) -> None:
    printing = "while True: print('step', 'x' * 4000, flush=True)"
    run = launch(runs.spec(sys.executable, "-c", printing), small_disk(40))
    ended = runs.until(run, lambda s: s.state not in LIVE)
    assert ended.state is RunState.FAILED
    assert required(ended.detail).startswith(f"the disk of {run.path} is full; the command exited")
    (warning,) = ended.cautions
    assert "MB are free on the disk of" in warning.what
    for log in run.logs_dir(1).glob("*.log"):
        log.unlink()
    runs.until_alone(run)


def test_a_stop_on_a_disk_that_has_no_room_for_a_file(runs: Runs, small_disk: Mount) -> None:
    """The shim learns all the same that the end is recorded, and no supervisor judges it again."""
    disk = small_disk(40, most_files=400)
    run = launch(runs.spec("sleep", "300"), disk)
    runs.until(run, lambda s: s.state is RunState.RUNNING)
    with contextlib.suppress(OSError):
        for number in range(400):
            (disk / str(number)).touch()
    runs.end(run, "stop")
    assert run.engine_final_path(1).exists()
    assert resolve_snapshot(run).state is RunState.STOPPED
