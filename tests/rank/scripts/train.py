"""An ordinary Lightning script, which knows nothing of the dashboard.

Arguments: package (lightning or pytorch_lightning), then key=value.
"""

import importlib
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

PACKAGE = sys.argv[1]
OPTIONS = dict(text.split("=", 1) for text in sys.argv[2:])
pl: Any = importlib.import_module({"lightning": "lightning.pytorch"}.get(PACKAGE, PACKAGE))


def option(name, default):
    return type(default)(OPTIONS.get(name, default))


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def loss(self, batch):
        rows, targets = batch
        return torch.nn.functional.mse_loss(self.layer(rows).squeeze(-1), targets)

    def training_step(self, batch, batch_idx):
        time.sleep(option("step_s", 0.0) * (1 + 2 * self.global_rank * option("skew", 0)))
        if self.global_rank == option("raise_rank", -1) and batch_idx == 3:
            raise ValueError("the user's own mistake")
        loss = self.loss(batch)
        self.log("fit/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        time.sleep(option("val_s", 0.0))
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            print(f"EPOCH END {self.current_epoch}", flush=True)

    def on_validation_end(self):
        if self.global_rank == 0 and not self.trainer.sanity_checking:
            print(f"VALIDATION END {self.trainer.global_step}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(length):
    rows = torch.randn(length, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, rows.sum(1))
    return DataLoader(data, batch_size=4, num_workers=option("workers", 0))


if __name__ == "__main__":
    torch.manual_seed(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=option("epochs", 2),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=2,
    )
    trainer.fit(Model(), loader(8 * option("batches", 10)), loader(8 * option("val_batches", 3)))
    print(f"AFTER FIT rank {trainer.global_rank} step {trainer.global_step}", flush=True)
