"""Stops at a step or at an epoch's end that were asked for beforehand, and requests on the way.

That a run stops exactly where it is planned, and resumes exactly, is in ``test_coordinator.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.tensor_queue.control_block import Command
from tests.rank.models import Linear, loader
from tests.rank.runs import RunFolder


def saved(run: RunFolder) -> tuple[Path, int, int]:
    (path,) = run.checkpoints
    state = torch.load(path, weights_only=True)
    return path, state["global_step"], state["epoch"]


def test_a_cancelled_plan_stops_nothing(run: RunFolder, fit: Any) -> None:
    run.plan(step=8, epochs=2)

    def do(module: Any, index: int) -> None:
        if module.trainer.global_step == 3:
            run.plan()

    fit(Linear(do), loader(5), max_epochs=3)
    assert run.checkpoints == []
    assert len(run.steps()) == 15


def test_a_plan_made_late_stops_at_the_next_step(run: RunFolder, fit: Any) -> None:
    def do(module: Any, index: int) -> None:
        if module.trainer.global_step == 6:
            run.plan(step=3)

    with pytest.raises(RunStopped):
        fit(Linear(do), loader(10), max_epochs=1)
    assert saved(run)[1] == 7


def test_the_run_ends_before_a_later_plan(run: RunFolder, fit: Any) -> None:
    run.plan(epochs=2)
    fit(Linear(), loader(3), max_epochs=2)
    assert run.events("stopped") == []
    assert len(run.events("finished")) == 1


def test_other_requests_are_carried_out_on_the_way(run: RunFolder, fit: Any) -> None:
    run.plan(step=6)

    def do(module: Any, index: int) -> None:
        if module.trainer.global_step == 2:
            run.request(Command.CHECKPOINT)
        # Asked for in the very step that the stop is planned for.
        if module.trainer.global_step == 5:
            run.request(Command.CHECKPOINT)

    with pytest.raises(RunStopped):
        fit(Linear(do), loader(10), max_epochs=1)
    names = [path.name for path in run.checkpoints]
    assert names[0] == "step-00000003-request.ckpt"
    assert names[-1] == "step-00000006-stop.ckpt"


class Scored(Linear):
    """Validates with a value a time: that of ``SCORES`` for the epoch."""

    SCORES = (0.5, 0.7, 0.3, 0.4, 0.6)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("val/score", self.SCORES[self.trainer.current_epoch])


@pytest.mark.parametrize(("mode", "steps"), [("min", [9, 12]), ("max", [6, 15])])
def test_the_best_checkpoints_by_a_metric_are_kept(
    run: RunFolder, fit: Any, mode: str, steps: list[int]
) -> None:
    extra = {
        "LTUI_CHECKPOINT_BEST": "val/score",
        "LTUI_CHECKPOINT_BEST_MODE": mode,
        "LTUI_CHECKPOINT_BEST_KEEP": "2",
    }
    fit(Scored(), loader(3), loader(1), max_epochs=3, extra=extra)
    run.attempt = 2
    # Another attempt knows what the one before has kept.
    last = run.checkpoints[-1]
    resumed = {**extra, "LTUI_RESUME_FROM": str(last)}
    fit(Scored(), loader(3), loader(1), max_epochs=5, extra=resumed)
    names = [path.name for path in run.checkpoints]
    assert names == [f"step-{step:08d}-best.ckpt" for step in steps]
    (manifest,) = [json.loads(Path(f"{p}.json").read_text()) for p in run.checkpoints[:1]]
    assert manifest["best"]["metric"] == "val/score"
    assert manifest["best"]["mode"] == mode
    state = torch.load(run.checkpoints[0], weights_only=True)
    # Of the very weights that were validated.
    assert state["global_step"] == steps[0]


def test_a_changed_learning_rate_is_not_undone_by_the_checkpoint(run: RunFolder, fit: Any) -> None:
    run.plan(step=7)
    with pytest.raises(RunStopped):
        fit(Linear(), loader(5), max_epochs=3)
    (path,) = run.checkpoints
    rates = []

    class Slower(Linear):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.001, weight_decay=0.3)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            group = optimizer.param_groups[0]
            rates.append((group["lr"], group["weight_decay"]))

    def resumed(changed: list[str]) -> list[tuple[float, float]]:
        run.attempt += 1
        rates.clear()
        extra = {"LTUI_RESUME_FROM": str(path), "LTUI_CHANGED": json.dumps(changed)}
        fit(Slower(), loader(5), max_epochs=2, extra=extra)
        return list(rates)

    assert resumed([])[:3] == [(0.0025, 0.0)] * 2 + [(0.00125, 0.0)]
    slower = resumed(["optimizer.init_args.lr=0.001", "optimizer.init_args.weight_decay=0.3"])
    # At step 7 the schedule has halved the rate twice.
    assert [rate for rate, _ in slower] == pytest.approx([0.00025] * 2 + [0.000125])
    assert {decay for _, decay in slower} == {0.3}
    (note,) = [e["text"] for e in run.events("note") if e["text"].startswith("Continues with")]
    assert note == (
        "Continues with weight_decay 0.3, learning rate 0.00025 instead of the checkpoint's."
    )


def test_a_request_during_a_checkpoint_and_with_accumulation(run: RunFolder, fit: Any) -> None:
    class Asking(Linear):
        """Asks for a stop while the checkpoint it has asked for is being saved."""

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if run.requests == 1:
                run.request(Command.STOP)

    def do(module: Any, index: int) -> None:
        # In a batch of which the optimizer takes no step.
        if index == 2:
            run.request(Command.CHECKPOINT)

    with pytest.raises(RunStopped):
        fit(Asking(do), loader(12), max_epochs=1, accumulate_grad_batches=2)
    assert [p.name for p in run.checkpoints] == [
        "step-00000002-request.ckpt",
        "step-00000003-stop.ckpt",
    ]


def test_a_stop_between_two_epochs(run: RunFolder, fit: Any) -> None:
    class Asking(Linear):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            if self.trainer.current_epoch == 1:
                run.request(Command.STOP)

    model = Asking()
    with pytest.raises(RunStopped):
        fit(model, loader(3), loader(1), max_epochs=4)
    assert saved(run)[1:] == (6, 2)
    assert model.order[-1] == "epoch end 1"


def saving(run: RunFolder, fit: Any, folder: Path, saves: dict[str, Any], **extra: str) -> None:
    """Train two epochs of three steps with a ModelCheckpoint. Every second batch has no step."""
    files = ModelCheckpoint(folder, "{step}", save_top_k=-1, **saves)
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    fit(Linear(), loader(5), loader(1), callbacks=[files, run.callback(**extra)], **options)


def saved_in(folder: Path) -> dict[str, tuple[bool, int, int]]:
    """Return if it is a link, the step and the number of batches of each file."""
    states = {path: torch.load(path, weights_only=True) for path in folder.iterdir()}
    counts = {p: s["loops"]["fit_loop"]["epoch_loop.batch_progress"] for p, s in states.items()}
    return {
        path.name: (path.is_symlink(), state["global_step"], counts[path]["total"]["processed"])
        for path, state in states.items()
    }


@pytest.mark.parametrize(
    "saves",
    [
        {"monitor": "fit_loss", "every_n_train_steps": 1},
        # The first steps have no such value, so the validation saves.
        {"monitor": "val_loss", "every_n_train_steps": 2, "save_on_train_epoch_end": False},
        # The end saves if nothing was saved before.
        {"every_n_train_steps": 4, "save_last": True},
        {"every_n_train_steps": 2, "save_last": True},
        {"every_n_train_steps": 2, "save_last": "link"},
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_model_checkpoint_saves_the_files_of_a_run_without_a_stop(
    run: RunFolder, fit: Any, saves: dict[str, Any], steps: int
) -> None:
    never, stopped = run.path / "never", run.path / "stopped"
    run.attempt = 9
    saving(run, fit, never, saves)
    run.attempt = 1
    run.plan(step=steps)
    with pytest.raises(RunStopped):
        saving(run, fit, stopped, saves)
    (path,) = run.checkpoints
    run.attempt = 2
    saving(run, fit, stopped, saves, LTUI_RESUME_FROM=str(path))
    assert saved_in(stopped) == saved_in(never) != {}


def test_a_model_checkpoint_that_resumes_in_another_folder_saves_the_last_there(
    run: RunFolder, fit: Any
) -> None:
    saves = {"every_n_train_steps": 4, "save_last": True}
    run.plan(step=5)
    with pytest.raises(RunStopped):
        saving(run, fit, run.path / "one", saves)
    (path,) = run.checkpoints
    run.attempt = 2
    saving(run, fit, run.path / "other", saves, LTUI_RESUME_FROM=str(path))
    assert saved_in(run.path / "one") == {"step=4.ckpt": (False, 4, 7), "last.ckpt": (False, 4, 7)}
    assert saved_in(run.path / "other") == {"last.ckpt": (False, 6, 10)}
