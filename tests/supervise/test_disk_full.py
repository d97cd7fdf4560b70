"""A disk that fills up under a run: training goes on, what is missing is said, then made up for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltui.training.lifecycle.launch_run import launch
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.supervise.conftest import Runs

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=0700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    (disk / "runs").mkdir()
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return ballast


def _start(runs: Runs, disk: Path, *options: str) -> RunDir:
    spec = runs.spec("true")
    engine = runs.spec(*_command(*options)).command
    run = launch(spec.with_changes(command=engine), disk)
    runs.until(run, lambda s: (s.global_step or 0) > 5)
    return run


def _command(*options: str) -> tuple[str, ...]:
    import sys

    from tests.supervise.conftest import ENGINE

    return (sys.executable, str(ENGINE), "2", *options)


def test_history_catches_up_once_there_is_room(runs: Runs, small_disk: Path) -> None:
    run = _start(runs, small_disk)
    ballast = _fill(small_disk)
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
    ballast = _fill(small_disk)
    gate.touch()
    ended = runs.until(run, lambda s: s.state is RunState.FINISHED)
    assert ended.history_note is not None
    assert runs.processes(run), "the supervisor left without having written the end"
    ballast.unlink()
    runs.until_alone(run)
    assert runs.ended(run).history_note is None
    assert runs.steps(run) == list(range(1, 151))
