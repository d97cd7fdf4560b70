"""Trains with faults that the file ``fault`` of the working directory asks for: ``KIND STEP RANK``.

``nan``: a module's output has a NaN; ``gradient``: a gradient has one; ``differs``: a weight gets
another bit. ``faulty_program.py ddp|lightning|untracked STEPS STEP_S [BATCHES]`` trains without
Lightning, with it, or without a line for ltui, and accumulates gradients of so many batches for a
step. It also logs to TensorBoard and saves checkpoints of its own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = Path("fault")
BATCHES = int(sys.argv[4]) if len(sys.argv) > 4 else 1
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def fault_at(step: int) -> str:
    """Return the kind of the fault that this rank has in a step; empty if none."""
    kind, at, rank = FAULT.read_text(encoding="utf-8").split() if FAULT.exists() else ("", "0", "0")
    return kind if (int(at), int(rank)) == (step, RANK) else ""


class Head(nn.Module):
    """A layer with a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.step = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        fault = fault_at(self.step) if self.training else ""
        if fault == "nan":
            return y * torch.tensor([float("nan"), *[1.0] * (len(y) - 1)]).reshape(-1, 1)
        # The gradient of the square root is infinite at 0, and 0 times infinity is NaN.
        return y + (y * 0).abs().sqrt() if fault == "gradient" else y


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))


def loader(sampled: bool) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(960, 8, generator=torch.Generator().manual_seed(0)))
    sampler: Any = DistributedSampler(data) if sampled else None
    return DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None)


def change_bit(parameter: torch.Tensor) -> None:
    parameter.data.view(torch.int32)[0, 0] ^= 1 << 16


def train_plain(steps: int, step_s: float, *, tracked: bool) -> None:
    import ltui_rank as ltui
    from torch.utils.tensorboard import SummaryWriter

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(RANK)
    model: Any = nn.Sequential(body(), Head())
    head = model[1]
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    writer = SummaryWriter("board") if RANK == 0 else None

    def save(folder: Path) -> None:
        torch.save(
            {name: each.state_dict() for name, each in state.items()} | {"n": head.step},
            folder / "s.pt",
        )

    def load(folder: Path) -> None:
        saved = torch.load(folder / "s.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        head.step = saved["n"]

    if tracked:
        ltui.on_checkpoint(save, load)
    track: Any = ltui.track if tracked else lambda loop: loop
    for _ in track(range(steps * BATCHES // 60 + 1)):
        for number, (batch,) in enumerate(track(loader(dist.is_initialized())), 1):
            if fault_at(head.step) == "differs":
                change_bit(head.linear.weight)
            loss = model(batch).pow(2).mean()
            loss.backward()
            if number % BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
            ltui.log({"train/loss": loss})
            if number % BATCHES:
                continue
            if writer is not None:
                writer.add_scalar("board/loss", loss.item(), head.step)
                torch.save(model.state_dict(), "own.pt")
            if head.step == steps:
                return
            head.step += 1
            time.sleep(step_s)


def train_lightning(steps: int, step_s: float) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body(), Head()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            self.head.step = self.global_step + 1
            if fault_at(self.head.step) == "differs":
                change_bit(self.head.linear.weight)
            time.sleep(step_s)
            loss: torch.Tensor = self.head(self.body(batch[0])).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=steps,
        accumulate_grad_batches=BATCHES,
        logger=[CSVLogger("csv"), TensorBoardLogger("boards")],
        log_every_n_steps=5,
        callbacks=[ModelCheckpoint("own", every_n_train_steps=10, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader(sampled=False))


if __name__ == "__main__":
    kind, number, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if kind == "lightning":
        train_lightning(number, seconds)
    else:
        train_plain(number, seconds, tracked=kind == "ddp")
