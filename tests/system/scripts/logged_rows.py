"""A training by DDP that logs quickly, by Lightning's CSVLogger and TensorBoardLogger too.

``rank-N.json`` has what each rank logged, one line for each step.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

PEAK = 40
"""The step whose value is above all others."""
ATTEMPT = os.environ["LTUI_ATTEMPT"]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.row: tuple[int, float] = (0, 0.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        while self.global_step >= 2 and not Path("go").exists():
            time.sleep(0.01)
        loss: torch.Tensor = self.layer(batch).pow(2).mean()
        self.log("each", loss)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("peak", float(self.global_step + 1 == PEAK))
        self.row = self.global_step + 1, loss.item()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.row[0]:
            with Path(f"rank-{self.global_rank}.json").open("a") as file:
                file.write(json.dumps(self.row) + "\n")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.layer(batch).pow(2).mean(), sync_dist=True)
        self.log("val/score", math.sin(self.global_step), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(ranks: int) -> None:
    torch.manual_seed(1)
    rows: Any = torch.randn(ranks * 240, 8)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        max_epochs=3,
        accumulate_grad_batches=2,
        val_check_interval=0.25,
        log_every_n_steps=1,
        logger=[
            CSVLogger("csv", name="", version=f"attempt-{ATTEMPT}"),
            TensorBoardLogger("board", name="", version=f"attempt-{ATTEMPT}"),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    validation = torch.utils.data.DataLoader(rows[:8], batch_size=2)
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=2), validation)


if __name__ == "__main__":
    main(int(sys.argv[1]))
