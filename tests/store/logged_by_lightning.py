"""A small training with Lightning's own loggers, which also prints what they were given."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


class Recorder(Logger):
    """Keeps every value that the other loggers receive, too."""

    name = version = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[str, int, float]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.values += [(name, int(step or 0), float(value)) for name, value in metrics.items()]

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing to do."""


class Line(LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        if self.global_step > 4:
            self.log("late metric", float("nan") if self.global_step == 6 else 1 / self.global_step)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val/loss", self.layer(batch).square().mean() + float("inf") * self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: str) -> None:
    torch.manual_seed(1)
    samples: Any = torch.randn(8, 3)
    data: Any = torch.utils.data.DataLoader(samples, batch_size=2)
    recorder = Recorder()
    Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=[CSVLogger(folder, "csv"), TensorBoardLogger(folder, "board"), recorder],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Line(), data, data)
    print(json.dumps(recorder.values))


if __name__ == "__main__":
    main(sys.argv[1])
