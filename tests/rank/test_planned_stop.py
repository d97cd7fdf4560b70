"""A stop at a step or at an epoch's end that was asked for beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.tensor_queue.control_block import Command, ControlFile
from tests.rank.models import Linear, loader
from tests.rank.runs import RunFolder


def plan(run: RunFolder, step: int | None = None, epochs: int | None = None) -> None:
    run.queue_dir.mkdir(parents=True, exist_ok=True)
    control = ControlFile.open(run.queue_dir / "control.bin")
    control.plan(step, epochs)
    control.close()


class Dropping(Linear):
    """Weights depend on random states and on the order of shuffled data."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(torch.nn.functional.dropout(batch, 0.3), batch_idx)
        self.log("train/dropped", loss)
        return loss


def trained(fit: Any, model: Linear, *, validate: bool = True, **options: Any) -> Linear:
    torch.manual_seed(3)
    data = [loader(5, shuffle=True), loader(2)] if validate else [loader(5, shuffle=True)]
    fit(model, *data, **{"max_epochs": 4, **options})
    return model


def saved(run: RunFolder) -> tuple[Path, int, int]:
    (path,) = run.checkpoints
    state = torch.load(path, weights_only=True)
    return path, state["global_step"], state["epoch"]


@pytest.mark.parametrize(
    ("planned", "at", "options"),
    [
        ({"step": 7}, (7, 1), {}),
        ({"step": 10}, (10, 1), {}),
        # The last batch of an epoch that no validation follows: once the epoch is over.
        ({"step": 10}, (10, 2), {"validate": False}),
        ({"epochs": 2}, (10, 2), {}),
        ({"epochs": 2}, (10, 2), {"validate": False}),
        ({"epochs": 3}, (15, 3), {"check_val_every_n_epoch": 2}),
        ({"epochs": 2}, (6, 2), {"accumulate_grad_batches": 2}),
        ({"step": 4}, (4, 1), {"accumulate_grad_batches": 2}),
    ],
)
def test_it_stops_there_and_resumes_exactly(
    run: RunFolder, fit: Any, planned: Any, at: tuple[int, int], options: Any
) -> None:
    run.attempt = 9
    reference = trained(fit, Dropping(), **options)
    run.attempt = 1
    plan(run, **planned)
    first = Dropping()
    with pytest.raises(RunStopped):
        trained(fit, first, **options)
    path, *where = saved(run)
    assert tuple(where) == at
    assert [e["global_step"] for e in run.events("stopped")] == [at[0]]
    run.attempt = 2
    second = trained(fit, Dropping(), extra={"LTUI_RESUME_FROM": str(path)}, **options)
    assert first.order + second.order == reference.order
    assert torch.equal(second.layer.weight, reference.layer.weight)


def test_a_cancelled_plan_stops_nothing(run: RunFolder, fit: Any) -> None:
    plan(run, step=8, epochs=2)

    def do(module: Any, index: int) -> None:
        if module.trainer.global_step == 3:
            plan(run)

    fit(Linear(do), loader(5), max_epochs=3)
    assert run.checkpoints == []
    assert len(run.steps()) == 15


def test_a_plan_made_late_stops_at_the_next_step(run: RunFolder, fit: Any) -> None:
    def do(module: Any, index: int) -> None:
        if module.trainer.global_step == 6:
            plan(run, step=3)

    with pytest.raises(RunStopped):
        fit(Linear(do), loader(10), max_epochs=1)
    assert saved(run)[1] == 7


def test_the_run_ends_before_a_later_plan(run: RunFolder, fit: Any) -> None:
    plan(run, epochs=2)
    fit(Linear(), loader(3), max_epochs=2)
    assert run.events("stopped") == []
    assert len(run.events("finished")) == 1


def test_a_failed_checkpoint_ends_the_plan_and_not_the_training(run: RunFolder, fit: Any) -> None:
    (run.path / "checkpoints").write_text("not a folder")
    plan(run, step=2)
    fit(Linear(), loader(5), max_epochs=1)
    (failed,) = run.events("checkpoint_failed")
    assert failed["reason"] == "stop"
    assert len(run.steps()) == 5


def test_other_requests_are_carried_out_on_the_way(run: RunFolder, fit: Any) -> None:
    plan(run, step=6)

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
    plan(run, step=7)
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
