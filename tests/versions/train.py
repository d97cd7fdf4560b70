"""A two-rank Lightning script: ``train.py RESULT`` writes a digest of the final weights.

Random order, dropout and momentum, so that a resume that loses a position or a random state ends
with other weights.
"""

import hashlib
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)  # Long enough for a stop to be scheduled while the training runs.
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


if __name__ == "__main__":
    L.seed_everything(1)
    x = torch.randn(640, 16)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    net = Net()
    trainer.fit(net, DataLoader(dataset, batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        digest = hashlib.sha256()
        for tensor in net.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        Path(sys.argv[1]).write_text(f"{trainer.global_step} {digest.hexdigest()}\n")
