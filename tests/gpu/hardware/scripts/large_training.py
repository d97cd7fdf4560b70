"""A training that fills memory: python large_training.py FILE DEVICE WIDTH LAYERS PRODUCTS.

A model of LAYERS square layers of WIDTH with Adam takes 16 bytes of the device for each parameter.
Each step also computes PRODUCTS large matrix products, to keep a GPU busy. FILE gets a line for
every step, with its number and the time. It does not import ltui.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_STEPS = 1_000_000
_PACE_S = 0.005


class Module(pl.LightningModule):
    """Square layers, made on the device because random numbers of a CPU take long."""

    def __init__(self, file: Path, device: str, width: int, layers: int, products: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(width, width, bias=False, device=device) for _ in range(layers))
        )
        self.factor = torch.randn(4096 if products else 1, 4096 if products else 1, device=device)
        self.factor = self.factor.bfloat16()
        self.file, self.products = file, products

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for _ in range(self.products):
            self.factor @ self.factor
        time.sleep(_PACE_S)
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": self.trainer.global_step, "t": time.time()}) + "\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-6)


def main() -> None:
    file, device, *numbers = sys.argv[1:]
    width, layers, products = map(int, numbers)
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        max_steps=_STEPS,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(torch.randn(800, width))
    module = Module(Path(file), device, width, layers, products)
    trainer.fit(module, DataLoader(rows, batch_size=8))


if __name__ == "__main__":
    main()
