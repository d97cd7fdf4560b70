"""An ordinary Lightning script that notes when its first step was done, for ``bench_run``."""

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.pause_s = pause_s

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0 and self.current_epoch == 0:
            Path(os.environ["FIRST_STEP_FILE"]).write_text(repr(time.time()))
        time.sleep(self.pause_s)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    epochs, pause_s = int(sys.argv[1]), float(sys.argv[2])
    L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "2")),
        strategy="ddp",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Net(pause_s), DataLoader(TensorDataset(torch.randn(512, 16)), batch_size=8))
