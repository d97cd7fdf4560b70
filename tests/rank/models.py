"""Small models and data for tests that train within the test process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ltui.training.rank import channel
from ltui.training.tensor_queue.control_block import Command
from tests.rank.runs import QUIET, RunFolder


class Rows(Dataset):
    """``length`` fixed random rows; each takes ``sleep_s`` to fetch."""

    def __init__(self, length: int, sleep_s: float = 0.0) -> None:
        self.rows = torch.randn(length, 8, generator=torch.Generator().manual_seed(0))
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.rows[index]


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(8)


def loader(batches: int, **options: Any) -> DataLoader:
    return DataLoader(Rows(batches * 4, options.pop("sleep_s", 0.0)), batch_size=4, **options)


class Linear(pl.LightningModule):
    """A linear layer. ``do`` is called with the module and the batch index in every training step,
    and with -1 minus the index in every validation step."""

    def __init__(self, do: Callable[[Any, int], None] | None = None, step_s: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.do, self.step_s = do, step_s
        self.order: list[str] = []
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.zeros_(self.layer.bias)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.do:
            self.do(self, batch_idx)
        time.sleep(self.step_s)
        self.order.append(f"train {self.trainer.global_step}")
        loss: torch.Tensor = self.layer(batch).pow(2).mean()
        self.log("fit_loss", loss)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.order.append(f"val {batch_idx}")
        if self.do and not self.trainer.sanity_checking:
            self.do(self, -1 - batch_idx)
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch).pow(2).mean())

    def on_train_epoch_end(self) -> None:
        self.order.append(f"epoch end {self.trainer.current_epoch}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class TwoOptimizers(Linear):
    """Manual optimization, two optimizers, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for layer, optimizer in zip((self.layer, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(batch).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.layer, self.other)]


def requests_at(run: RunFolder, command: Command, at: int) -> Callable[[Any, int], None]:
    """Return an action for ``Linear`` that sends one request, in batch ``at`` of the whole run."""
    batches = itertools.count()

    def do(_module: Any, index: int) -> None:
        if index >= 0 and next(batches) == at:
            run.request(command)

    return do


def train(
    run: RunFolder, model: Any, *data: Any, call: str = "fit", extra: Any = None, **options: Any
) -> Any:
    """Train in this process with ltui's callback, and return the Trainer.

    ``extra`` are variables of the rank, ``options`` those of a new Trainer, or ``trainer``.
    """
    trainer = options.pop("trainer", None) or pl.Trainer(
        **{
            **QUIET,
            "devices": 1,
            "num_sanity_val_steps": 0,
            "default_root_dir": run.path,
            "callbacks": [run.callback(**(extra or {}))],
            **options,
        }
    )
    getattr(trainer, call)(model, *data)
    return trainer


def close_channel() -> None:
    """Close the channel of this process, as its end would."""
    if channel._current is not None:
        channel._current.close()
        channel._current = None
