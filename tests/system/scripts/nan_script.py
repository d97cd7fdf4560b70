"""A Lightning script whose loss is NaN from a given step on. Arguments: the step; steps in all;
``crash`` to raise an exception 100 steps later. Both are so in the first attempt only."""

import os
import sys
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

NAN_FROM, STEPS = int(sys.argv[1]), int(sys.argv[2])
FIRST = os.environ.get("LTUI_ATTEMPT", "1") == "1"


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        step = self.global_step + 1
        time.sleep(0.05)
        loss = self.layer(batch[0]).pow(2).mean()
        if FIRST and step >= NAN_FROM:
            loss = loss * float("nan")
        if FIRST and "crash" in sys.argv and step == NAN_FROM + 100:
            raise RuntimeError("as planned")
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=4))
