"""Fits of Lightning's Tuner: no checkpoint of ours, no stop, and events that name them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner
from torch.utils.data import DataLoader

from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.shared.record_types import StepField
from ltui.training.tensor_queue.control_block import Command
from tests.rank.models import Linear, loader
from tests.rank.runs import QUIET, RunFolder

PERIODIC = {"LTUI_CHECKPOINT_EVERY_S": "3600", "LTUI_CHECKPOINT_KEEP": "2"}


class Tuned(Linear):
    """A model whose learning rate and batch size the finders may set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lr = 0.1
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(loader(8).dataset, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(1)


def _callbacks(run: RunFolder, *more: Any) -> list[Any]:
    return [*more, run.callback(**PERIODIC)]


def test_finders_leave_one_end_checkpoint_and_send_events(run: RunFolder, fit: Any) -> None:
    finders = (
        BatchSizeFinder(steps_per_trial=2, max_trials=2),
        LearningRateFinder(num_training_steps=12),
    )
    model = Tuned()
    fit(model, max_epochs=1, callbacks=_callbacks(run, *finders))
    (path,) = run.checkpoints
    assert path.name.endswith("-end.ckpt")
    steps = run.column(StepField.GLOBAL_STEP)
    assert path.name == f"step-{int(steps[-1]):08d}-end.ckpt"
    texts = [e["text"] for e in run.events("phase") if "finder" in e["text"]]
    assert texts == [
        "The batch size finder began its trial training.",
        "The batch size finder ended.",
        "The learning rate finder began its trial training.",
        "The learning rate finder ended.",
    ]
    assert run.events("finished")
    assert run.events("note") == []
    assert run.events("exception") + run.events("telemetry_off") == []


def test_a_fit_that_only_tunes_does_not_finish_the_run(run: RunFolder, fit: Any) -> None:
    options = {**QUIET, "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    callbacks = _callbacks(run)
    trainer = pl.Trainer(**options, default_root_dir=run.path, callbacks=callbacks)
    model = Tuned()
    Tuner(trainer).lr_find(model, num_training=12)
    assert run.checkpoints == []
    assert run.events("finished") == []
    run.request(Command.CHECKPOINT)
    trainer.fit(model)
    assert [p.name.rpartition("-")[2] for p in run.checkpoints] == ["request.ckpt", "end.ckpt"]
    assert len(run.events("finished")) == 1


def test_a_stop_waits_until_the_finder_has_ended(run: RunFolder, fit: Any) -> None:
    calls: list[int] = []

    def ask(_: Any, index: int) -> None:
        calls.append(index)
        if len(calls) == 3:
            run.request(Command.STOP)

    finder = LearningRateFinder(num_training_steps=12)
    with pytest.raises(RunStopped):
        fit(Tuned(ask), max_epochs=1, callbacks=_callbacks(run, finder))
    (path,) = run.checkpoints
    assert path.name == "step-00000001-stop.ckpt"
    assert len(calls) > 12
