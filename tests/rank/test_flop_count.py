"""One batch's floating point operations are counted, and training is the same with and without."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from ltui.training.rank import callback_factory
from ltui.training.rank.environment import RankEnvironment
from ltui.training.tensor_queue.record_types import RecordKind


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


def train(fit: Any, run: Any, *, count: bool, batches: int = 6) -> Linear:
    environment = RankEnvironment.read(run.environment())
    callback = callback_factory.rebuild_callback("lightning", environment)
    counter = (
        [callback_factory.rebuild_callback("lightning", callback, callback_factory.FLOP_COUNT)]
        if count
        else []
    )
    rows = torch.arange(batches * 32, dtype=torch.float32).reshape(-1, 8) / 100
    model = Linear()
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    fit(model, loader, max_epochs=1, callbacks=[callback, *counter])
    return model


def counted(run: Any) -> list[dict[str, Any]]:
    labels = [json.loads(r.label) for r in run.records() if r.kind == RecordKind.EVENT]
    return [label for label in labels if label["kind"] == "flops"]


def test_a_batch_is_counted_once(fit: Any, run: Any) -> None:
    train(fit, run, count=True)
    (event,) = counted(run)
    # Forward, and the gradient of the weights: two products of 4 x 8 x 3, two operations each.
    assert event["flops"] == 2 * (2 * 4 * 8 * 3)
    assert event["tf32"] is False


def test_too_few_batches_count_nothing(fit: Any, run: Any) -> None:
    train(fit, run, count=True, batches=2)
    assert counted(run) == []


def test_counting_changes_nothing(fit: Any, run: Any) -> None:
    plain = train(fit, run, count=False)
    assert counted(run) == []
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
