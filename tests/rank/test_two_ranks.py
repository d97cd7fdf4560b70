"""Two real ranks: unmodified scripts under torch elastic and under Lightning's own launcher.

Each run is made once and looked at by several tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ltui.training.shared.record_types import Outcome, Phase, RecordKind, StepField
from ltui.training.tensor_queue.control_block import Command
from tests.live_processes import processes_with, wait_until_gone
from tests.rank.runs import RunFolder, Script
from tests.required import required
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(300)


def both_paused(run: RunFolder) -> bool:
    return all(required(run.pulse(rank)).phase == Phase.PAUSED for rank in (0, 1))


def steps_done(run: RunFolder, rank: int = 0) -> int:
    pulse = run.pulse(rank)
    return 0 if pulse is None else pulse.global_step


@pytest.fixture(scope="module")
def python_without_ltui(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has torch and Lightning, and cannot import ltui by itself."""
    folder = tmp_path_factory.mktemp("without-ltui")
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    import torch

    # A bare line adds the folder to the path without running the .pth files in it, hence without
    # the finder of an editable install.
    (packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    python = str(folder / "bin/python")
    probe = "import torch, importlib.util as u; print(u.find_spec('ltui'))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    answer = subprocess.run(
        [python, "-c", probe], capture_output=True, text=True, env=environment, check=True, cwd="/"
    )
    assert answer.stdout.strip() == "None"
    return python


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory, side: Path) -> Iterator[Any]:
    """torch elastic, ``lightning``: paused, checkpointed, continued; SIGTERM to rank 1 alone."""
    run = RunFolder(tmp_path_factory.mktemp("controlled"))
    options = ["epochs=1000", "step_s=0.01", "skew=1", "batches=40", "workers=1"]
    with Script(run, side, ["lightning", *options], torchrun=2) as script:
        observed = SimpleNamespace(run=run, script=script)
        wait_for(lambda: steps_done(run) > 5, script.process)
        observed.pids = script.pids()
        run.request(Command.PAUSE)
        wait_for(lambda: both_paused(run), script.process)
        observed.paused_at = [required(run.pulse(r)).global_step for r in (0, 1)]
        run.request(Command.CHECKPOINT)
        wait_for(
            lambda: all(required(run.pulse(r)).decision_done == 2 for r in (0, 1)), script.process
        )
        observed.still_at = [required(run.pulse(r)).global_step for r in (0, 1)]
        run.request(Command.CONTINUE)
        wait_for(lambda: steps_done(run) > observed.paused_at[0] + 3, script.process)
        observed.asked_at = steps_done(run, 1)
        os.kill(observed.pids[1], signal.SIGTERM)
        observed.code = script.wait()
        yield observed


def test_both_ranks_send_records(controlled: Any) -> None:
    for rank in (0, 1):
        (hello,) = controlled.run.labels(RecordKind.HELLO, rank)
        assert (hello["rank"], hello["local_rank"], hello["world_size"]) == (rank, rank, 2)
        assert hello["pid"] == controlled.pids[rank]
        steps = controlled.run.column(StepField.GLOBAL_STEP, rank)
        assert steps == list(range(1, len(steps) + 1))
        assert set(controlled.run.column(StepField.SAMPLES, rank)) == {4}
    # Each rank's own loss, not a reduced one.
    losses = [controlled.run.column(StepField.LOSS, rank)[:5] for rank in (0, 1)]
    assert losses[0] != losses[1]


def test_all_pause_at_one_step(controlled: Any) -> None:
    paused_at = controlled.paused_at
    assert paused_at[0] == paused_at[1]
    assert paused_at == controlled.still_at
    assert [e["global_step"] for e in controlled.run.events("continued")] == paused_at[:1]
    assert controlled.run.events("paused", rank=1) == []


def test_sigterm_to_one_rank_stops_all_at_one_step(controlled: Any) -> None:
    run = controlled.run
    assert controlled.code == 0, controlled.script.output()
    (stopped,) = run.events("stopped")
    assert stopped["global_step"] - controlled.asked_at <= 3
    assert {required(run.pulse(r)).global_step for r in (0, 1)} == {stopped["global_step"]}
    assert {required(run.pulse(r)).outcome for r in (0, 1)} == {Outcome.STOPPED}
    names = [path.name for path in run.checkpoints]
    assert names[0] == f"step-{controlled.paused_at[0]:08d}-request.ckpt"
    assert names[1] == f"step-{stopped['global_step']:08d}-stop.ckpt"
    assert "AFTER FIT" not in controlled.script.output()


def test_no_process_is_left(controlled: Any) -> None:
    wait_until_gone(lambda: processes_with("LTUI_RUN_DIR", controlled.run.path))


@pytest.mark.slow
def test_resumed_by_the_other_package_and_launcher(
    controlled: Any, side: Path, python_without_ltui: str
) -> None:
    """``pytorch_lightning``, its own launcher, an environment without ltui; runs to its end."""
    run = RunFolder(controlled.run.path, attempt=2)
    path = controlled.run.checkpoints[-1]
    at = controlled.run.events("stopped")[0]["global_step"]
    epochs = at // 40 + 2
    options = [f"epochs={epochs}", "batches=40"]
    script = Script(run, side, ["pytorch_lightning", *options], python=python_without_ltui)
    script.extra = {"LTUI_RESUME_FROM": str(path)}
    with script:
        assert script.wait() == 0, script.output()
    for rank in (0, 1):
        steps = run.column(StepField.GLOBAL_STEP, rank)
        assert steps == list(range(at + 1, epochs * 40 + 1))
        assert required(run.pulse(rank)).outcome == Outcome.FINISHED
        assert "(pytorch_lightning)" in run.labels(RecordKind.HELLO, rank)[0]["lightning"]
    assert run.events("resumed")[0]["global_step"] == at
    assert run.events("resumed", rank=1) == []
    assert script.output().count("AFTER FIT") == 2
    assert [step for step, _ in run.metrics()["val/loss"]] == [
        40 * epoch for epoch in range(at // 40 + 1, epochs + 1)
    ]


@pytest.fixture(scope="module")
def validating(tmp_path_factory: pytest.TempPathFactory, side: Path) -> Any:
    """Lightning's own launcher, ``lightning``: stopped within validation, then resumed."""
    run = RunFolder(tmp_path_factory.mktemp("validating"))
    options = ["epochs=2", "batches=6", "val_batches=400", "val_s=0.01"]
    observed = SimpleNamespace(run=run)
    with Script(run, side, ["lightning", *options]) as first:
        wait_for(
            lambda: (pulse := run.pulse()) and pulse.phase == Phase.VALIDATION and pulse.batch > 5,
            first.process,
        )
        run.request(Command.STOP)
        observed.code, observed.output = first.wait(), first.output()
    observed.events, observed.metrics = run.events("stopped"), run.metrics()
    observed.steps = [run.column(StepField.GLOBAL_STEP, rank) for rank in (0, 1)]
    run.attempt = 2
    options[2:] = ["val_batches=3"]
    resume = {"LTUI_RESUME_FROM": str(run.checkpoints[0])}
    with Script(run, side, ["lightning", *options], extra=resume) as second:
        observed.second_code, observed.second_output = second.wait(), second.output()
    return observed


@pytest.mark.slow
def test_stop_within_validation_leaves_at_once(validating: Any) -> None:
    assert validating.code == 0, validating.output
    assert validating.events[0]["global_step"] == 6
    assert validating.steps == [[1, 2, 3, 4, 5, 6]] * 2
    assert "VALIDATION END" not in validating.output
    assert "EPOCH END" not in validating.output
    assert "AFTER FIT" not in validating.output
    assert "val/loss" not in validating.metrics


@pytest.mark.slow
def test_the_validation_runs_again_on_resume(validating: Any) -> None:
    assert validating.second_code == 0, validating.second_output
    lines = [line for line in validating.second_output.splitlines() if " END " in line]
    assert lines == ["VALIDATION END 6", "EPOCH END 0", "VALIDATION END 12", "EPOCH END 1"]
    assert validating.run.column(StepField.GLOBAL_STEP) == list(range(7, 13))


@pytest.mark.slow
def test_an_error_in_one_rank_is_reported_by_it_first(run: RunFolder, side: Path) -> None:
    with Script(run, side, ["lightning", "raise_rank=1"], torchrun=2) as script:
        assert script.wait() != 0
    (event,) = run.events("exception", rank=1)
    assert (event["type"], event["message"]) == ("ValueError", "the user's own mistake")
    for other in run.events("exception", rank=0):
        assert other["t"] >= event["t"]


PRESET = """
import json
import os
from pathlib import Path

import torch
import lightning.pytorch as pl
from ltui.training.tensor_queue.queue_reader import QueueReader

class Model(pl.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, index):
        return self.layer(batch).pow(2).mean()

    def on_test_start(self):
        folder = Path(os.environ["LTUI_RUN_DIR"])
        queue = QueueReader(folder / f"queue/1/rank-{self.global_rank:05d}.queue")
        (folder / f"in-test-{self.global_rank}").write_text(queue.pulse().outcome.name)
        queue.close()

    def test_step(self, batch, index):
        self.log("test/loss", self.layer(batch).pow(2).mean(), sync_dist=True)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)

    test_dataloader = train_dataloader
"""


def preset(folder: Path) -> Path:
    (folder / "mine.py").write_text(PRESET)
    document = {
        "config": {
            "seed_everything": 3,
            "trainer": {"max_epochs": 2, "accelerator": "cpu", "devices": "auto"},
            "model": {"class_path": "mine.Model"},
            "data": {"class_path": "mine.Data"},
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
        "after_fit": ["test"],
        "python_path": [str(folder)],
    }
    (folder / "config.json").write_text(json.dumps(document))
    return folder / "config.json"


@pytest.mark.slow
def test_a_preset_runs_through_the_worker_entry(run: RunFolder, side: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["-m", "ltui.training.rank.train_preset", str(preset(run.path))]
    environment = {**os.environ, **run.environment(), "PYTHONPATH": str(side)}
    environment["OMP_NUM_THREADS"] = "1"
    ended = subprocess.run(
        command, env=environment, cwd=run.path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        assert run.column(StepField.GLOBAL_STEP, rank) == list(range(1, 17))
        # The following test stage resets the outcome of training and finishes itself.
        assert (run.path / f"in-test-{rank}").read_text() == "RUNNING"
        assert (required(run.pulse(rank)).outcome, required(run.pulse(rank)).phase) == (
            Outcome.FINISHED,
            Phase.ENDED,
        )
    assert [step for step, _ in run.metrics()["test/loss"]] == [16]
    assert run.column(StepField.LR)[0] == 0.01
    assert not (run.path / "config.yaml").exists()


@pytest.mark.slow
def test_a_pause_takes_no_core_and_a_planned_stop_is_met_by_all(run: RunFolder, side: Path) -> None:
    options = ["epochs=1000", "step_s=0.01", "skew=1", "batches=40"]
    with Script(run, side, ["lightning", *options], torchrun=2) as script:
        wait_for(lambda: steps_done(run) > 5, script.process)
        run.request(Command.PAUSE)
        wait_for(lambda: both_paused(run), script.process)
        ranks = [psutil.Process(pid) for pid in script.pids()]
        before = [sum(rank.cpu_times()[:2]) for rank in ranks]
        time.sleep(2.0)
        used = [sum(rank.cpu_times()[:2]) - b for rank, b in zip(ranks, before, strict=True)]
        assert max(used) < 1.0, used
        step = steps_done(run) + 50
        run.plan(step)
        run.request(Command.CONTINUE)
        assert script.wait() == 0, script.output()
    assert [required(run.pulse(r)).global_step for r in (0, 1)] == [step, step]
    assert [p.name for p in run.checkpoints] == [f"step-{step:08d}-stop.ckpt"]
