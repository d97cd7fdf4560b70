"""Trains without Lightning and says how to save and load: ``resumable_program.py KIND STEP_S``.

Appends ``STEP LOSS`` to ``losses-RANK.txt`` for each step, and ends with the sum of the weights.
epochs: tracked epochs around a shuffled loader, a scheduler, gradients of two batches; spawn and
forkserver: the same with this start method of the worker. range: one
tracked range, batches drawn at random. iterable: a stream without a position. refuses: ``save``
raises. writes-nothing: ``save`` writes no file. bad-load: ``load`` raises.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ltui_rank as ltui
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

EPOCHS, SAMPLES, STEPS = 5, 480, 120


class Stream(IterableDataset[torch.Tensor]):
    """Draws its samples from a generator of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(SAMPLES):
            yield torch.randn(8, generator=generator)


class Training:
    """The model, and all that a checkpoint must have."""

    def __init__(self, kind: str, rank: int, step_s: float) -> None:
        self.kind, self.rank, self.step_s = kind, rank, step_s
        self.plain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        for parameter in self.plain.parameters():
            nn.init.constant_(parameter, 0.1)
        distributed = dist.is_initialized()
        self.model = DistributedDataParallel(self.plain) if distributed else self.plain
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.done = 0

    def save(self, folder: Path) -> None:
        if self.kind == "refuses":
            raise OSError("this program cannot save today")
        state = {
            "model": self.plain.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "done": self.done,
        }
        if self.kind != "writes-nothing":
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path) -> None:
        if self.kind == "bad-load":
            raise ValueError("the model has another shape")
        state = torch.load(folder / "state.pt", weights_only=True)
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.done = state["done"]

    def train(self, batch: torch.Tensor, *, step: bool = True) -> None:
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        if not step:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.done += 1
        ltui.log({"train/loss": loss}, twice=2 * self.done)
        with Path(f"losses-{self.rank}.txt").open("a", encoding="utf-8") as file:
            file.write(f"{self.done} {loss.item()!r}\n")
        time.sleep(self.step_s)


def train_epochs(training: Training) -> None:
    data = TensorDataset(torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0)))
    sampler: DistributedSampler[Any] | None = None
    if dist.is_initialized():
        sampler = DistributedSampler(data)
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_size=5,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=1,
        multiprocessing_context=None if training.kind == "epochs" else training.kind,
    )
    for epoch in ltui.track(range(EPOCHS)):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(ltui.track(loader)):
            training.train(batch, step=number % 2 == 1)


def main(kind: str, step_s: float) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    training = Training(kind, rank, step_s)
    resumed = ltui.on_checkpoint(training.save, training.load)
    if kind in ("epochs", "spawn", "forkserver"):
        train_epochs(training)
    elif kind == "iterable":
        for batch in ltui.track(DataLoader(Stream(), batch_size=4)):
            training.train(batch)
    else:
        for _ in ltui.track(range(STEPS)):
            training.train(torch.randn(4, 8))
    total = sum(parameter.double().sum().item() for parameter in training.plain.parameters())
    print(f"rank {rank}: resumed {resumed}, {training.done} steps, weights {total!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
