"""A run with a mirror: TensorBoard reads what the history holds, whatever is killed or full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ltui.app.cli import main
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.event_mirror import RESTART_S, EventMirror
from tests.required import required
from tests.small_disk import fill
from tests.store.event_files import assert_complete, read_events
from tests.store.test_export_formats import make_run
from tests.supervise.conftest import Runs, stored_events
from tests.waiting import wait_for

pytest.importorskip("tensorboard")


def mirrored(runs: Runs, *options: str, mirror: str = "tensorboard") -> RunDir:
    spec = runs.spec(*runs.fake_command(*options)).with_changes(mirror=mirror)
    return launch(spec, runs.home)


def mirror_process(runs: Runs, run: RunDir) -> psutil.Process | None:
    found = [p for p in runs.processes(run) if any("event_mirror" in w for w in p.cmdline())]
    return found[0] if found else None


def until_mirrored(folder: Path, step: int) -> None:
    def newest_step() -> int:
        losses = read_events(folder).get("train/loss", []) if folder.exists() else []
        return losses[-1][0] if losses else 0

    wait_for(newest_step, wanted=lambda newest: newest >= step, seconds=120, period_s=0.2)


def test_the_values_appear_while_the_run_goes_on_and_are_complete(runs: Runs) -> None:
    """Also if the supervisor is killed, and the run is killed and resumed."""
    run = mirrored(runs, mirror="tensorboard:boards")
    folder = runs.cwd / "boards" / run.id
    until_mirrored(folder, 20)
    first = resolve_snapshot(run)
    assert first.state is RunState.RUNNING
    runs.replace_supervisor(run)
    until_mirrored(folder, required(first.global_step) + 20)
    runs.order(run, "checkpoint")
    runs.until(run, lambda s: s.checkpoints)
    runs.more_steps(run)
    killed = runs.end(run, "kill")
    assert_complete(run, folder)
    resume(run)
    last = required(killed.global_step)
    runs.until(run, lambda s: s.attempt == 2 and (s.global_step or 0) > last)
    assert runs.end(run, "stop").state is RunState.STOPPED
    assert_complete(run, folder)
    assert stored_events(run, "mirror") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_training_goes_on_when_the_disk_of_the_mirror_is_full(
    runs: Runs, small_disk: Callable[..., Path]
) -> None:
    disk = small_disk(2)
    ballast = fill(disk)
    run = mirrored(runs, mirror=f"tensorboard:{disk}")
    noted = wait_for(lambda: stored_events(run, "mirror"), seconds=120)
    assert "cannot be written (No space left on device)" in noted[0].text
    runs.more_steps(run)
    ballast.unlink()
    assert runs.end(run, "stop").state is RunState.STOPPED
    assert_complete(run, disk / run.id)


def test_a_mirror_that_was_killed_is_started_again(runs: Runs) -> None:
    run = runs.training()
    mirror = EventMirror(run, run.read_spec().with_changes(mirror="tensorboard"))
    assert mirror.update(0.0) == []
    process = required(mirror_process(runs, run))
    assert process.cmdline()[-1] == str(run.path / "tensorboard")
    process.kill()
    (event,) = wait_for(lambda: mirror.update(1.0), seconds=60)
    assert event.text == "TensorBoard mirror: its process ended; it is started again"
    assert mirror.update(RESTART_S - 1) == []
    assert mirror_process(runs, run) is None
    assert mirror.update(RESTART_S) == []
    assert mirror_process(runs, run) is not None
    mirror.close()
    wait_for(lambda: mirror_process(runs, run), wanted=lambda p: p is None, seconds=60)
    runs.end(run, "stop")


def test_a_mirror_whose_package_is_gone_is_not_started_again(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise ImportError('it is gone')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = make_run(private_home, "owl-0001")
    (run.path / "logs").mkdir(exist_ok=True)
    mirror = EventMirror(run, run.read_spec().with_changes(mirror="tensorboard"))
    events = mirror.update(0.0)

    def has_ended() -> bool:
        events.extend(mirror.update(1.0))
        return mirror._process is None

    wait_for(has_ended, seconds=60)
    (event,) = events
    assert "the package `tensorboard` cannot be imported (it is gone)" in event.text
    assert mirror.update(RESTART_S) == []
    assert mirror._process is None


def test_a_history_that_cannot_be_read_does_not_end_the_mirror(private_home: Path) -> None:
    run = make_run(private_home, "owl-0001")
    run.db_path.write_bytes(b"no database" * 1000)
    command = [sys.executable, "-m", "ltui.training.supervise.event_mirror", str(run.path), "m"]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, cwd=run.path
    )
    assert "TensorBoard mirror: the run's history is damaged" in ended.stdout
    assert ended.stdout.endswith("; ltui tries again\n")


def test_a_mirror_without_tensorboard_is_refused_before_the_start(
    private_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main(["exec", "--mirror", "tensorboard", "--detach", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert "mirror tensorboard: the package `tensorboard` cannot be imported." in error
    assert "-m pip install 'tensorboard>=" in error
    assert list((private_home / "runs").iterdir()) == []


def test_a_wrong_mirror_is_refused(private_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--detach", "--", "true"]
    assert main(["exec", "--mirror", "tensorboard:/dev/null/x", *command]) == 2
    assert "/dev/null is not a folder that can be written." in capsys.readouterr().err
    assert main(["exec", "--mirror", "wandb", *command]) == 2
    assert "`wandb` is not tensorboard or tensorboard:FOLDER." in capsys.readouterr().err
    assert list((private_home / "runs").iterdir()) == []
