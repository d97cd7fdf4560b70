"""Runs whose history is on a local disk, with a copy in the run directory for other machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.training.lifecycle.delete_runs import delete, remove
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.run_status import recover_run, resolve_snapshot
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.find_run import restore
from ltui.training.store.history_place import ELSEWHERE_S, read_place, remove_unneeded_histories
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.small_disk import fill
from tests.store.other_machine import seen_from_other_machine
from tests.supervise.conftest import Runs
from tests.waiting import wait_for


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine for histories."""
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setenv("LTUI_HISTORY_DIR", str(folder))
    monkeypatch.setenv("LTUI_HISTORY_COPY_S", "0.2")
    return folder


def _folder(run: RunDir) -> Path:
    return required(required(read_place(run)).folder)


def test_another_machine_follows_a_run_and_changes_nothing(runs: Runs, local: Path) -> None:
    run = runs.training()
    runs.until(run, lambda _: run.db_path.exists())
    # The first copy may be older than the first step.
    seen = wait_for(
        lambda: seen_from_other_machine(run, local),
        wanted=lambda copied: copied.state == "running" and copied.rows,
    )
    assert seen.detail.endswith(f"runs on {os.uname().nodename}")
    before = required(resolve_snapshot(run).supervisor_pid)
    runs.more_steps(run, 30)
    ended = runs.end(run, "stop")
    assert ended.state is RunState.STOPPED
    assert before not in {process.pid for process in runs.processes(run)}
    assert runs.has_all_steps(run, ended.global_step)
    seen = seen_from_other_machine(run, local)
    assert (seen.state, seen.history_note) == ("stopped", "None")
    assert seen.rows == 2 * required(ended.global_step)
    assert list((local / f"ltui-{os.getuid()}" / "history").iterdir()) == []


def test_the_supervisor_killed_again_and_again(runs: Runs, local: Path) -> None:
    """Each new supervisor continues the history on the local disk, not the older copy."""
    run = runs.training()
    folder = _folder(run)
    for _ in range(3):
        runs.replace_supervisor(run)
        runs.more_steps(run, 10)
        assert _folder(run) == folder
    ended = runs.end(run, "stop")
    assert ended.history_note is None
    assert runs.has_all_steps(run, ended.global_step)
    assert required(read_place(run)).folder is None


def test_a_machine_that_died_with_its_disk(
    runs: Runs, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next supervisor begins with the copy, and reads the rest from the queues of the ranks."""
    monkeypatch.setenv("LTUI_HISTORY_COPY_S", "3600")
    run = runs.training(step=20)
    runs.until(run, lambda _: run.db_path.exists())
    goal = required(runs.more_steps(run, 40).global_step)
    runs.kill_everything(run)
    shutil.rmtree(local)
    local.mkdir()
    # A killed process still counts as alive until the kernel has freed its memory.
    wait_for(lambda: recover_run(run))
    ended = runs.ended(run)
    assert "the part after" in required(ended.history_note)
    # The ranks were killed at the same moment, which may be between two records of the same step.
    steps = [runs.steps(run, rank) for rank in (0, 1)]
    assert all(own == list(range(1, own[-1] + 1)) for own in steps)
    assert min(own[-1] for own in steps) >= required(ended.global_step) - 1 >= goal - 1


def test_a_silent_machine_is_not_continued_elsewhere_before_its_time(
    runs: Runs, local: Path
) -> None:
    run = runs.training()
    runs.until(run, lambda _: run.db_path.exists())
    runs.kill_everything(run)
    assert seen_from_other_machine(run, local).state in ("starting", "running")
    old = os.stat(run.history_place_path).st_mtime - ELSEWHERE_S
    os.utime(run.history_place_path, (old, old))
    seen = seen_from_other_machine(run, local)
    assert seen.state not in ("running", "starting")
    assert f"stayed on {os.uname().nodename}" in seen.history_note


def test_a_run_directory_that_fills_up(
    runs: Runs, local: Path, small_disk: Callable[..., Path]
) -> None:
    disk = small_disk(40)
    run = launch(runs.spec(*runs.fake_command()), disk)
    runs.until(run, lambda s: (s.global_step or 0) > 5 and run.db_path.exists())
    ballast = fill(disk)
    full = runs.until(run, lambda s: s.history_note is not None)
    assert required(full.history_note).startswith("not copied to the run directory since ")
    runs.more_steps(run, 30)
    assert max(runs.steps(run)) > required(full.global_step), "the history itself continues"
    ballast.unlink()
    runs.until(run, lambda s: s.history_note is None)
    ended = runs.end(run, "stop")
    assert runs.has_all_steps(run, ended.global_step)
    assert required(read_place(run)).folder is None


def test_deleting_a_run_deletes_what_could_not_be_copied(runs: Runs, local: Path) -> None:
    run = runs.training()
    runs.kill_everything(run)
    folder = _folder(run)
    assert folder.exists()
    runs.until(run, lambda s: s.state not in LIVE)
    deleted = delete(run)
    remove_unneeded_histories()
    assert folder.exists()
    restore(deleted)
    steps = runs.steps(run)
    assert steps
    remove(delete(run))
    assert not folder.exists()
