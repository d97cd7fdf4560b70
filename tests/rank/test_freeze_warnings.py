"""Freeze warnings from a module's source and at the start of a run, without false alarms."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ltui.training.rank import callback_factory
from ltui.training.rank.freeze_warnings import find_log_call_warnings, shared_memory_warnings

_SOURCE = """
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_only

class Base(LightningModule):
    @rank_zero_only
    def decorated(self):
        self.log("a", 1.0, sync_dist=True)  # alone

class Model(Base):
    def training_step(self, batch):
        self.log("b", 1.0, sync_dist=True, rank_zero_only=True)  # both
        self.log("fine", 1.0, sync_dist=True)
        self.log("fine", 1.0, rank_zero_only=True)
        if self.trainer.is_global_zero and batch:
            self.log_dict({"c": 1.0}, sync_dist=True)  # alone
            self.log("fine", 1.0)
        else:
            self.log("fine", 1.0, sync_dist=True)
        if self.global_rank == 0:
            self.log("d", 1.0, sync_dist=True)  # alone
        if self.global_rank != 0 or not self.trainer.is_global_zero:
            self.log("fine", 1.0, sync_dist=True)
        other.log("fine", 1.0, sync_dist=True, rank_zero_only=True)
"""


def test_log_calls_in_the_source_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "their_model.py"
    path.write_text(_SOURCE)
    spec = importlib.util.spec_from_file_location("their_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Python finds the file of a class through this entry.
    monkeypatch.setitem(sys.modules, "their_model", module)
    spec.loader.exec_module(module)
    lines = _SOURCE.splitlines()
    expected = {i + 1: line.split("# ")[1] for i, line in enumerate(lines) if "# " in line}
    reasons = {}
    for warning in find_log_call_warnings(module.Model):
        name, _, line = warning.what.split(" ")[0].partition(":")
        assert name == "their_model.py"
        assert warning.remedy
        reasons[int(line)] = "alone" if "only one rank runs" in warning.what else "both"
    assert reasons == expected


def test_classes_without_source_are_skipped() -> None:
    assert find_log_call_warnings(type("Made", (pl.LightningModule,), {})) == []


class Model(pl.LightningModule):
    def __init__(self, *, give_size: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.give_size = give_size

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        size = len(batch[0]) if self.give_size else None
        self.log("error", loss, on_epoch=True, on_step=False, batch_size=size)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _collate(rows: Any) -> list[torch.Tensor]:
    values = torch.stack([row for (row,) in rows])
    return [values, values.flatten()[:3]]


def _warnings(run: Any, fit: Any, *, give_size: bool) -> list[dict[str, Any]]:
    callback = run.callback()
    freeze_warnings = callback_factory.rebuild_callback(
        "lightning", callback, callback_factory.FREEZE_WARNINGS
    )
    loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4, collate_fn=_collate)
    fit(Model(give_size=give_size), loader, max_epochs=2, callbacks=[callback, freeze_warnings])
    events: list[dict[str, Any]] = run.events("warning")
    return events


def test_a_guessed_batch_size_is_reported_once(run: Any, fit: Any) -> None:
    (event,) = _warnings(run, fit, give_size=False)
    assert "length 3, 4" in event["text"]
    assert "error" in event["text"]
    assert "batch_size=" in event["remedy"]


def test_a_given_batch_size_is_not_reported(run: Any, fit: Any) -> None:
    assert _warnings(run, fit, give_size=True) == []


def test_shared_memory_is_compared_with_the_batches_of_workers() -> None:
    (warning,) = shared_memory_warnings(10 << 20, 8, 2, 64 << 20)
    assert "160 MiB" in warning.what
    assert "64 MiB" in warning.what
    assert not list(shared_memory_warnings(1 << 20, 8, 2, 64 << 20))
