"""A stop at a step or at an epoch's end that was asked for beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ltui.training.queue.control import Command, ControlFile
from ltui.training.rank.stopped import RunStopped
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
def test_it_stops_there_and_resumes_as_never_stopped(
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


def test_the_end_of_the_run_goes_before_a_plan(run: RunFolder, fit: Any) -> None:
    plan(run, epochs=2)
    fit(Linear(), loader(3), max_epochs=2)
    assert run.events("stopped") == []
    assert len(run.events("finished")) == 1


def test_a_disk_that_refuses_ends_the_plan_not_the_training(run: RunFolder, fit: Any) -> None:
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
            run.ask(Command.CHECKPOINT)
        # Asked for in the very step that the stop is planned for.
        if module.trainer.global_step == 5:
            run.ask(Command.CHECKPOINT)

    with pytest.raises(RunStopped):
        fit(Linear(do), loader(10), max_epochs=1)
    names = [path.name for path in run.checkpoints]
    assert names[0] == "step-00000003-request.ckpt"
    assert names[-1] == "step-00000006-stop.ckpt"
