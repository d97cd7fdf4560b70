"""Trains without Lightning, as ``KIND`` says, and prints its steps and the sum of its weights.

    plain_program.py KIND STEPS SECONDS_PER_STEP

ddp: under torchrun. early: rank 1 ends after half of the steps. raises: rank 1 raises in the
middle. fork, spawn: starts two ranks itself. alone: one process without a process group, which
afterwards runs another one that trains, and then trains on with a new optimizer. skips: a gradient
scaler skips every fifth step. several: two optimizers step together. compiled: the step is
compiled. unknown: two ranks that do not combine their gradients. beside:
two processes that know nothing of each other. usr1: SIGUSR1 makes it save and
exit, other signals that stop do nothing.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def batches(steps: int) -> Iterator[torch.Tensor]:
    loader: Any = DataLoader(TensorDataset(torch.randn(16 * steps, 8)), batch_size=16)
    for (batch,) in loader:
        yield batch


def train(kind: str, steps: int, seconds: float, rank: int = 0) -> None:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(8, 2)
    if dist.is_initialized() and kind != "unknown":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    second = torch.optim.Adam(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "skips")
    step = torch.compile(optimizer.step, backend="eager") if kind == "compiled" else None
    ends = [time.perf_counter()]
    for number, batch in enumerate(batches(steps)):
        if rank == 1 and number == steps // 2:
            if kind == "early":
                return
            if kind == "raises":
                raise ValueError("a bad batch")
        loss = model(batch).pow(2).sum()
        if kind == "skips" and number % 5 == 4:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step is not None:
            step()
        else:
            scaler.step(optimizer)
        scaler.update()
        if kind == "several":
            second.step()
        time.sleep(seconds)
        ends.append(time.perf_counter())
    # Of the steps of which ltui keeps the times.
    step_s = statistics.median(end - begin for begin, end in pairwise(ends[-33:]))
    total = sum(p.double().sum().item() for p in model.parameters())
    # One write: the ranks share the pipe, and print writes the end of the line on its own.
    sys.stdout.write(f"rank {rank}: {steps} steps of {step_s:.4f} s, weights {total!r}\n")
    sys.stdout.flush()
    if rank == 0:
        torch.save(model.state_dict(), "weights.pt")


def start_rank(rank: int, kind: str, steps: int, seconds: float) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train(kind, steps, seconds, rank)
    dist.destroy_process_group()


def train_beside(_number: int, steps: int, seconds: float) -> None:
    train("alone", steps, seconds)


def exit_by_usr1() -> None:
    def leave(_number: int, _frame: object) -> None:
        print("saved by the program", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, leave)


def main(kind: str, steps: int, seconds: float) -> None:
    if kind == "usr1":
        exit_by_usr1()
    if kind in ("fork", "spawn"):
        arguments = (kind, steps, seconds)
        start_processes(start_rank, arguments, nprocs=2, start_method=kind)
    elif kind == "beside":
        start_processes(train_beside, (steps, seconds), nprocs=2, start_method="spawn")
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(kind, steps, seconds, dist.get_rank())
        dist.destroy_process_group()
    else:
        train(kind, steps, seconds)
        if kind == "alone":
            other = [sys.executable, __file__, "evaluation", "30", "0"]
            subprocess.run(other, check=True)
            train(kind, steps, seconds)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
