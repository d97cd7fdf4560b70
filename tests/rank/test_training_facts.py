"""What is known of a training before and beside its steps: settings, checkpoints, operations, and
freeze warnings without false alarms."""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ltui.training.models.gpt import GPT
from ltui.training.rank import callback_factory
from ltui.training.rank.freeze_warnings import find_log_call_warnings, shared_memory_warnings
from ltui.training.rank.training_facts import MAX_BYTES, send_hyperparameters
from tests.gpu.hardware.model_flops import gpt_flops
from tests.rank.models import Linear, loader
from tests.rank.runs import RunFolder
from tests.required import required


class WithHyperparameters(Linear):
    def __init__(self, width: int, name: str, layers: list[int]) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_script_reports_its_checkpoints_and_hyperparameters(
    run: RunFolder, fit: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(
        tmp_path / "own", "{epoch}", monitor="val_loss", save_top_k=1, save_last=True
    )
    fit(
        WithHyperparameters(32, "digits", [1, 2]),
        loader(3),
        loader(2),
        max_epochs=3,
        callbacks=[run.callback(), saver],
        enable_checkpointing=True,
    )
    (sent,) = run.events("hyperparameters")
    assert sent["values"] == {"width": 32, "name": "digits", "layers": "[1, 2]"}
    saved = run.events("script_checkpoint")
    assert all(event.pop("seconds") >= 0 for event in saved)
    best = [event for event in saved if event["best"]]
    assert best[-1]["path"] == saver.best_model_path
    assert best[-1]["metric"] == "val_loss"
    assert best[-1]["value"] == float(required(saver.best_model_score))
    assert {event["path"] for event in saved if event["last"]} == {saver.last_model_path}
    assert saved[-1]["global_step"] in (3, 6, 9)


def test_hyperparameters_are_bounded_and_plain() -> None:
    sent: list[dict[str, Any]] = []
    channel: Any = SimpleNamespace(event=lambda kind, text, **fields: sent.append(fields))
    many = {f"key{n}": "x" * 1000 for n in range(500)}
    module = SimpleNamespace(hparams={"_instantiator": 1, "net": object(), **many})
    send_hyperparameters(channel, SimpleNamespace(), module)
    (fields,) = sent
    assert fields["values"]["net"] == "object"
    assert "_instantiator" not in fields["values"]
    assert len(str(fields["values"])) < 2 * MAX_BYTES
    send_hyperparameters(channel, SimpleNamespace(), SimpleNamespace(hparams={}))
    assert len(sent) == 1


@dataclass
class Optimizer:
    rate: float = 0.25
    momentum: float = 0.5


@dataclass
class TrainConfig:
    optim: Optimizer = field(default_factory=Optimizer)
    api_key: str = "secret"


@dataclass
class Batch:
    images: int = 3


def test_settings_of_calling_functions_are_sent_with_their_defaults() -> None:
    sent: list[dict[str, Any]] = []
    channel: Any = SimpleNamespace(event=lambda kind, text, **fields: sent.append(fields))

    def step() -> None:
        batch = Batch()
        send_hyperparameters(channel)
        del batch

    def main(words: list[str]) -> None:
        parser = ArgumentParser()
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("--batch-size", type=int, default=64)
        parser.add_argument("--hf-token", default="secret")
        options, config = parser.parse_args(words), TrainConfig()
        step()
        del options, config

    main(["--lr", "0.3"])
    assert [fields["values"] for fields in sent] == [
        {
            "lr": 0.3,
            "batch_size": 64,
            "config.optim.rate": 0.25,
            "config.optim.momentum": 0.5,
        }
    ]


# Floating point operations.


def with_callback(run: RunFolder, name: str) -> list[Any]:
    """Return the callback of a rank, and another one of ltui that sends its events through it."""
    callback = run.callback()
    return [callback, callback_factory.rebuild_callback("lightning", callback, name)]


def counted(fit: Any, run: RunFolder, model: Any, data: Any, **options: Any) -> list[Any]:
    callbacks = with_callback(run, callback_factory.FLOP_COUNT)
    fit(model, data, max_epochs=1, callbacks=callbacks, **options)
    return run.events("flops")


def test_a_batch_is_counted_once_and_training_is_the_same(run: RunFolder, fit: Any) -> None:
    plain, seen = Linear(), Linear()
    fit(plain, loader(6), max_epochs=1)
    assert run.events("flops") == []
    (event,) = counted(fit, run, seen, loader(6))
    # Forward, and the gradient of the weights: two products of 4 x 8 x 1, two operations each.
    assert event["flops"] == 2 * (2 * 4 * 8 * 1)
    assert event["tf32"] is False
    assert torch.equal(plain.layer.weight, seen.layer.weight)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_count_of_a_gpt_follows_from_its_shapes(
    run: RunFolder, fit: Any, precision: str
) -> None:
    text = torch.randint(256, (6, 2, 9))
    data = DataLoader(TensorDataset(text[:, :, :-1], text[:, :, 1:]), batch_size=None)
    model = GPT(width=32, layers=3, heads=4, context=16)
    (event,) = counted(fit, run, model, data, precision=precision)
    assert event["flops"] == gpt_flops(width=32, layers=3, context=8, batch=2).fused


def test_too_few_batches_count_nothing(run: RunFolder, fit: Any) -> None:
    assert counted(fit, run, Linear(), loader(2)) == []


@pytest.mark.parametrize(("setting", "more"), [(None, []), ("0", []), ("1", ["LtuiFlops"])])
def test_operations_are_counted_only_on_request(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, setting: str | None, more: list[str]
) -> None:
    for name, value in run.environment().items():
        monkeypatch.setenv(name, value)
    if setting is not None:
        monkeypatch.setenv("LTUI_COUNT_FLOPS", setting)
    names = [type(callback).__name__ for callback in callback_factory.callbacks()]
    assert names == ["LtuiRank", "LtuiFreezeWarnings", *more]


# Freeze warnings.

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


class OfTwoLengths(Linear):
    """A module whose batches have tensors of different lengths."""

    def __init__(self, *, give_size: bool) -> None:
        super().__init__()
        self.give_size = give_size

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        size = len(batch[0]) if self.give_size else None
        self.log("error", loss, on_epoch=True, on_step=False, batch_size=size)
        return loss


def _collate(rows: Any) -> list[torch.Tensor]:
    values = torch.stack(rows)
    return [values, values.flatten()[:3]]


@pytest.mark.parametrize("give_size", [False, True])
def test_a_guessed_batch_size_is_reported_once(run: RunFolder, fit: Any, give_size: bool) -> None:
    callbacks = with_callback(run, callback_factory.FREEZE_WARNINGS)
    data = loader(8, collate_fn=_collate)
    fit(OfTwoLengths(give_size=give_size), data, max_epochs=2, callbacks=callbacks)
    events = run.events("warning")
    assert len(events) == (not give_size)
    for event in events:
        assert "length 3, 4" in event["text"]
        assert "error" in event["text"]
        assert "batch_size=" in event["remedy"]


def test_shared_memory_is_compared_with_the_batches_of_workers() -> None:
    (warning,) = shared_memory_warnings(10 << 20, 8, 2, 64 << 20)
    assert "160 MiB" in warning.what
    assert "64 MiB" in warning.what
    assert not list(shared_memory_warnings(1 << 20, 8, 2, 64 << 20))
