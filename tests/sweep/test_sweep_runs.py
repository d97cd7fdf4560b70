"""Sweeps of real runs: kills in the middle, retries, and pruned trials that go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ltui.training.process.identity import lock_holder
from ltui.training.store.history_reader import RunStore
from ltui.training.store.queue_files import dispatcher_lock
from ltui.training.store.run_directory import RunDir, list_runs
from ltui.training.sweep.record import IN_FLIGHT, Sweep
from ltui.training.sweep.sweep_files import find_sweep
from tests.ltui_command import run_ltui
from tests.waiting import wait_for

PROGRAM = """
import os, sys, time
size = int(sys.argv[sys.argv.index("--size") + 1])
with open("starts", "a") as file:
    file.write(f"{size} ")
time.sleep(0.5)
if size == 2 and not os.path.exists("mended"):
    raise RuntimeError("broken")
if size == 3:
    raise MemoryError("out of memory")
"""


@pytest.fixture(autouse=True)
def two_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The run queue has two slots, and no run or dispatcher is left."""
    config = tmp_path / "config" / "ltui" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("queue:\n  slots: 2\n")
    monkeypatch.chdir(tmp_path)
    yield
    home = tmp_path / "home"
    shutil.rmtree(home / "sweeps", ignore_errors=True)
    kill_dispatcher(home)
    for run_dir in list_runs(home):
        run_ltui("stop", run_dir.id, "--kill")


def kill_dispatcher(home: Path) -> None:
    """Kill the dispatcher as an administrator does, if there is one."""
    holder = lock_holder(dispatcher_lock(home))
    if holder is not None:
        os.kill(holder.pid, signal.SIGKILL)
        wait_for(lambda: lock_holder(dispatcher_lock(home)) is None)


def sweep(home: Path) -> Sweep:
    return find_sweep(home, "last").read()


def states(home: Path) -> list[str]:
    return [trial.state for trial in sweep(home).tried]


def test_kills_lose_no_trial_and_a_retry_runs_exactly_the_failed_cells(
    tmp_path: Path, private_home: Path
) -> None:
    (tmp_path / "t.py").write_text(PROGRAM)
    words = ("--set", "size=range(1, 4)", "--metric", "loss", "--at-once", "2", "--name", "s")
    run_ltui("sweep", *words, "--", "python", "t.py", code=0)
    for count in (1, 3):  # of runs that have been created
        wait_for(lambda count=count: len(list_runs(private_home)) >= count)  # type: ignore[misc]
        kill_dispatcher(private_home)
        run_ltui("sweep", "list", code=0)
    # The code is that of the moment at which the sweep was started.
    (tmp_path / "t.py").write_text("raise SystemExit('edited')")
    wait_for(lambda: sweep(private_home).state() == "finished")
    assert states(private_home) == ["finished", "failed", "out of memory", "finished"]
    starts = tmp_path / "starts"
    assert sorted(starts.read_text().split()) == ["1", "2", "3", "4"]

    (tmp_path / "mended").touch()
    done = run_ltui("sweep", "retry", "s", code=0)
    assert "1 trial of s runs again" in done.stdout
    assert "2 (out of memory)" in done.stdout
    wait_for(lambda: sweep(private_home).state() == "finished")
    assert states(private_home) == ["finished", "finished", "out of memory", "finished"]
    assert starts.read_text().split()[4:] == ["2"]

    # A cell is found again by its hash after the space was widened and the run was deleted.
    run_ltui("delete", "s-000", code=0)
    run_ltui("sweep", "append", "s", "--set", "size=range(0, 4)", code=0)
    wait_for(lambda: sweep(private_home).state() == "finished")
    assert starts.read_text().split()[5:] == ["0"]
    run_ltui("sweep", "retry", "s", "--missing", code=0)
    wait_for(lambda: sweep(private_home).state() == "finished")
    assert starts.read_text().split()[6:] == ["1"]
    listed = json.loads(run_ltui("sweep", "show", "s", "--json", code=0).stdout)["data"]
    assert [run[:-5] for run in listed["runs"]] == [
        *("s-000.2", "s-001.2", "s-002", "s-003", "s-004")
    ]


RATE = "model.init_args.learning_rate"
CALLBACK = """
import os, time
from lightning import Callback

class Slow(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        # The best trial is judged first at the rung; else the second best one would pass as well.
        while module.hparams.learning_rate != 0.01 and not os.path.exists("judged"):
            time.sleep(0.1)
        # So slow after the first rung that no trial is at the second one when it is judged.
        time.sleep(2.5 if 20 < trainer.global_step <= 35 else 0)
"""
QUICK = {
    "max_epochs": 100_000,
    "limit_train_batches": 5,
    "limit_val_batches": 1,
    "devices": 1,
    "callbacks": [{"class_path": "slow.Slow"}],
}


def write_program(folder: Path) -> None:
    """Write ``quick.yaml``: the preset quickstart, small and without an end."""
    document = yaml.safe_load((Path(__file__).parents[2] / "presets/quickstart.yaml").read_text())
    document["trainer"].update(QUICK)
    document["model"]["init_args"]["width"] = 4
    document["data"]["init_args"] = {"batch_size": 4, "loader": "torch"}
    (folder / "quick.yaml").write_text(yaml.safe_dump(document))
    (folder / "slow.py").write_text(CALLBACK)


def losses(run_dir: RunDir) -> dict[float, float]:
    """Return the loss of each step of a run, as stored."""
    with RunStore(run_dir) as store:
        curve = store.curve("train/loss", max_points=100_000)
    return dict(zip(curve.steps.tolist(), curve.mean.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_pruned_and_promoted_trial_equals_an_unpruned_one(
    tmp_path: Path, private_home: Path
) -> None:
    """Of four rates the second best is stopped at the rung, and goes on when half of four may."""
    write_program(tmp_path)
    words = ("--metric", "val/loss", "--at-once", "2", "--prune", "asha", "--rung", "20")
    rates = f"{RATE}=choice(0.01, 0.002, 0.0000001, 0.00000001)"
    run_ltui("sweep", "quick.yaml", "--set", rates, *words, "--reduction", "2", code=0)
    wait_for(lambda: sweep(private_home).tried and 20 in sweep(private_home).tried[0].scores)
    (tmp_path / "judged").touch()

    def again() -> list[str]:
        """The states once the second trial was promoted, and was stopped at the next rung."""
        tried = sweep(private_home).tried
        ended = len(tried) > 1 and tried[1].attempt == 2 and tried[1].state not in IN_FLIGHT
        return states(private_home) if ended else []

    assert wait_for(again, seconds=1000) == ["running", "pruned", "pruned", "pruned"]
    record = sweep(private_home)
    trial = record.tried[1]
    assert set(trial.scores) >= {20, 40}
    # It was told as pruned; how it ends is told as another trial.
    assert [told.suggestion for told in record.told if told.state == "pruned"] == [1, 2, 3, 1]
    run_ltui("sweep", "stop", "last", code=0)
    wait_for(lambda: states(private_home)[0] == "stopped")

    one = losses(RunDir(private_home / "runs" / sweep(private_home).run_id(trial)))
    rate = f"{RATE}=0.002"
    run_ltui("run", "quick.yaml", "--set", rate, "--name", "whole", "--detach", code=0)
    run_ltui("stop", "whole", "--at-step", str(int(max(one))))
    run_ltui("wait", "whole", code=3)
    whole = losses(next(run for run in list_runs(private_home) if run.id.startswith("whole")))
    assert len(one) > 40
    assert one == {step: whole[step] for step in one}

    # A stopped sweep goes on where it was.
    run_ltui("sweep", "resume", "last", code=0)
    before = sweep(private_home).tried[0].step or 0
    wait_for(lambda: (sweep(private_home).tried[0].step or 0) > before, seconds=300)
    assert sweep(private_home).tried[0].attempt == 2
