"""The facts that a script reports: hyperparameters, and the checkpoints that its callbacks save."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from ltui.training.rank.training_facts import MAX_BYTES, send_hyperparameters
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
