"""An ordinary Lightning script, which knows nothing of the dashboard.

Arguments: package (lightning or pytorch_lightning), then key=value.
"""

import importlib
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

PACKAGE = sys.argv[1]
OPTIONS = dict(text.split("=", 1) for text in sys.argv[2:])
if PACKAGE == "lightning":
    import lightning.pytorch as pl
else:
    pl = importlib.import_module("pytorch_lightning")


def option(name, default):
    return type(default)(OPTIONS.get(name, default))


class Data(Dataset):
    def __init__(self, length, sleep_s=0.0):
        self.length, self.sleep_s = length, sleep_s
        self.rows = torch.randn(length, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.rows[index], self.rows[index].sum()


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
        if option("nan_at", -1) == batch_idx:
            loss = loss * float("nan")
        self.log("fit/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        time.sleep(option("val_s", 0.0))
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            print(f"EPOCH END {self.current_epoch}", flush=True)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def on_validation_end(self):
        if self.global_rank == 0 and not self.trainer.sanity_checking:
            print(f"VALIDATION END {self.trainer.global_step}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(length, sleep_s=0.0):
    workers = option("workers", 0)
    return DataLoader(Data(length, sleep_s), batch_size=4, num_workers=workers)


if __name__ == "__main__":
    torch.manual_seed(1)
    devices = option("devices", 2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=option("epochs", 2),
        accumulate_grad_batches=option("accumulate", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=2,
    )
    rows = option("batches", 10) * 4 * devices
    trainer.fit(
        Model(),
        loader(rows, option("item_s", 0.0)),
        loader(option("val_batches", 3) * 4 * devices),
    )
    print(f"AFTER FIT rank {trainer.global_rank} step {trainer.global_step}", flush=True)
    if option("test", 0):
        trainer.test(Model(), loader(16), verbose=False)
