"""The directory of a live run is removed, or moved with its home."""

from __future__ import annotations

import shutil
from pathlib import Path

from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.live_processes import wait_until_gone
from tests.supervise.conftest import Runs
from tests.waiting import wait_for


def test_a_run_whose_directory_is_removed_ends(runs: Runs) -> None:
    run = runs.training()
    processes = runs.processes(run)
    assert len(processes) >= 4, "supervisor, shim and ranks"

    def remove() -> bool:
        # Its processes may create a file in it meanwhile.
        shutil.rmtree(run.path, ignore_errors=True)
        return not run.path.exists()

    wait_for(remove, seconds=30)
    wait_until_gone(lambda: [p for p in processes if p.is_running()], 60)
    assert not run.spec_path.exists()


def test_a_run_whose_home_is_moved_is_supervised_there(
    runs: Runs, private_home: Path, tmp_path: Path
) -> None:
    run = runs.training()
    processes = runs.processes(run)
    before = runs.until(run, lambda s: s.supervisor_pid)
    private_home.rename(tmp_path / "moved")
    (run.path / "checkpoints").mkdir(parents=True)  # as a rank does that saves there
    moved = RunDir(tmp_path / "moved" / "runs" / run.id)
    after = runs.until(moved, lambda s: s.supervisor_pid not in (None, before.supervisor_pid))
    goal = (after.global_step or 0) + 20
    runs.until(moved, lambda s: s.state is RunState.RUNNING and (s.global_step or 0) > goal)
    runs.order(moved, "kill")
    ended = runs.ended(moved, 30)
    assert ended.state is RunState.STOPPED
    assert runs.steps(moved) == list(range(1, len(runs.steps(moved)) + 1))
    wait_until_gone(lambda: [p for p in processes if p.is_running()], 60)
