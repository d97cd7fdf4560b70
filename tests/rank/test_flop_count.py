"""One batch's floating point operations are counted, and training is the same with and without."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ltui.training.models.gpt import GPT
from ltui.training.rank import callback_factory
from tests.gpu.hardware.model_flops import gpt_flops


class Linear(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 3)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def callbacks(run: Any, *, count: bool) -> list[Any]:
    callback = run.callback()
    if not count:
        return [callback]
    counter = callback_factory.rebuild_callback("lightning", callback, callback_factory.FLOP_COUNT)
    return [callback, counter]


def train(fit: Any, run: Any, *, count: bool, batches: int = 6) -> Linear:
    rows = torch.arange(batches * 32, dtype=torch.float32).reshape(-1, 8) / 100
    model = Linear()
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    fit(model, loader, max_epochs=1, callbacks=callbacks(run, count=count))
    return model


def test_a_batch_is_counted_once(fit: Any, run: Any) -> None:
    train(fit, run, count=True)
    (event,) = run.events("flops")
    # Forward, and the gradient of the weights: two products of 4 x 8 x 3, two operations each.
    assert event["flops"] == 2 * (2 * 4 * 8 * 3)
    assert event["tf32"] is False


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_count_of_a_gpt_follows_from_its_shapes(fit: Any, run: Any, precision: str) -> None:
    text = torch.randint(256, (6, 2, 9))
    loader = DataLoader(TensorDataset(text[:, :, :-1], text[:, :, 1:]), batch_size=None)
    model = GPT(width=32, layers=3, heads=4, context=16)
    counting = callbacks(run, count=True)
    fit(model, loader, max_epochs=1, precision=precision, callbacks=counting)
    (event,) = run.events("flops")
    assert event["flops"] == gpt_flops(width=32, layers=3, context=8, batch=2).fused


def test_too_few_batches_count_nothing(fit: Any, run: Any) -> None:
    train(fit, run, count=True, batches=2)
    assert run.events("flops") == []


def test_counting_changes_nothing(fit: Any, run: Any) -> None:
    plain = train(fit, run, count=False)
    assert run.events("flops") == []
    seen = train(fit, run, count=True)
    assert torch.equal(plain.layer.weight, seen.layer.weight)


def test_it_is_created_only_on_request(run: Any, monkeypatch: Any) -> None:
    for name, value in run.environment().items():
        monkeypatch.setenv(name, value)
    assert len(callback_factory.callbacks()) == 2
    monkeypatch.setenv("LTUI_COUNT_FLOPS", "0")
    assert len(callback_factory.callbacks()) == 2
    monkeypatch.setenv("LTUI_COUNT_FLOPS", "1")
    assert [type(c).__name__ for c in callback_factory.callbacks()] == [
        "LtuiRank",
        "LtuiFreezeWarnings",
        "LtuiFlops",
    ]
