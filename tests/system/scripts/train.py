"""An ordinary two-rank Lightning script that has never heard of ltui.

train.py [EPOCHS [WORKERS [START_METHOD]]]
"""

import os
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    L.seed_everything(1)
    x = torch.randn(512, 16)
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)),
        batch_size=8,
        shuffle=True,
        num_workers=int(sys.argv[2]) if len(sys.argv) > 2 else 0,
        persistent_workers=len(sys.argv) > 2,
        multiprocessing_context=sys.argv[3] if len(sys.argv) > 3 else None,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=os.getcwd(),
    )
    net = Net()
    trainer.fit(net, loader)
    print(f"trained to the end: {sum(p.double().sum().item() for p in net.parameters())!r}")
