"""Train with plain DDP on two ranks, slowed in one way: ``limited.py CASE SECONDS``."""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
from torch import distributed
from torch.nn import Linear, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASE, SECONDS = sys.argv[1], float(sys.argv[2])
RANK = os.environ["RANK"]


class Samples(Dataset[torch.Tensor]):
    """Samples that take some milliseconds in the two cases that are slow there."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if CASE in ("dataset", "workers"):
            time.sleep(0.02)
        if CASE == "slow_workers" and RANK == "1":
            decode()
        return torch.zeros(4 if CASE == "operators" else 512)


def decode() -> None:
    """Use a processor for some milliseconds."""
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass


def model() -> torch.nn.Module:
    if CASE == "operators":
        return Sequential(*(Linear(4, 4) for _ in range(400)))
    return Sequential(*(Linear(512, 512) for _ in range(4)))


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    batch = {"operators": 2, "healthy": 4096}.get(CASE, 512)
    workers = 1 if CASE in ("workers", "slow_workers") else 0
    ends, step = time.monotonic() + SECONDS, 0
    loader = DataLoader(Samples(), batch_size=16, num_workers=workers)
    batches = iter(loader) if CASE in ("dataset", "workers", "slow_workers") else None
    going = torch.ones(1)
    while going.item():
        sample = torch.randn(batch, 4 if CASE == "operators" else 512)
        inputs = sample if batches is None else next(batches)
        if CASE == "slow_rank" and rank == 1:
            time.sleep(0.5)
        if CASE == "sleeps":
            time.sleep(0.1)
        optimizer.zero_grad()
        net(inputs).mean().backward()
        if CASE == "all_reduce":
            distributed.all_reduce(torch.zeros(20_000_000))
        optimizer.step()
        step += 1
        if step % 10 == 0:
            around(step, net)
            going = torch.tensor([float(time.monotonic() < ends)])
            distributed.broadcast(going, 0)
    distributed.destroy_process_group()


def around(step: int, net: DistributedDataParallel) -> None:
    """Validate or save, in the cases that do it often."""
    if CASE == "validation":
        net.eval()
        with torch.no_grad():
            for (images,) in DataLoader(TensorDataset(torch.randn(40, 512))):
                net.module(images)
                time.sleep(0.05)
        net.train()
    if CASE == "checkpoints":
        with tempfile.NamedTemporaryFile() as file:
            torch.save({"step": step, "state": torch.zeros(120_000_000)}, file.name)


main()
