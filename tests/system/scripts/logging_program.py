"""Trains without Lightning under torchrun, and rank 0 logs by TensorBoard.

    logging_program.py STEPS SEED

It writes the loss of each step, the accuracy after every tenth by the number of the epoch, and the
same loss to the same tag of a second writer.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter


def main(steps: int, seed: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = dist.get_rank() == 0
    train, val = (SummaryWriter(f"runs/{name}") if first else None for name in ("train", "val"))
    for step in range(1, steps + 1):
        loss = model(torch.randn(16, 8)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if train is not None and val is not None:
            train.add_scalar("loss", loss, step)
            if step % 10 == 0:
                train.add_scalar("accuracy", step / steps, step // 10)
                val.add_scalar("loss", loss / 2, step // 10)
    for writer in (train, val):
        if writer is not None:
            writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
