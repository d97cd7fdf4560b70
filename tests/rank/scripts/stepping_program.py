"""Trains without a Trainer for 12 steps, and evaluates after every fourth, as ``KIND`` says.

Prints how many graphs were compiled, and whether the memory of the model was freed.

no_grad: fetches its evaluation's batches without gradients. eval_mode: only the model is in
evaluation mode, which it leaves before the next batch. late: which it leaves after it has fetched
the next batch, as the Hugging Face Trainer does. first: which it enters after it has fetched the
first batch, as ignite does. forward: which it has only in its forward passes, as MONAI does.
frozen: it trains in evaluation mode. groups: the first group of its optimizer is empty. backward:
each of 20 tensors has an optimizer of its own, which steps in the backward pass. compiled: the step
is compiled. sharded: ``fully_shard`` in a group of one rank.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

EVALUATION_S = 0.3


def evaluate(model: torch.nn.Module, loader: Any, kind: str) -> None:
    if kind not in ("first", "forward"):
        model.eval()
    with torch.set_grad_enabled(kind != "no_grad"):
        for (batch,) in loader:
            model.eval()
            with torch.no_grad():
                model(batch)
            if kind == "forward":
                model.train()
            time.sleep(EVALUATION_S / 3)


def step_in_backward(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(step)


def train(kind: str) -> tuple[int, weakref.ref[torch.nn.Module]]:
    """Return the number of compiled graphs, and a reference to a part of the model."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(10)))
    if kind == "sharded":
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        fully_shard(model)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if kind == "groups":
        groups.insert(0, {"params": []})
    optimizer = torch.optim.SGD(groups, lr=0.01)
    if kind == "backward":
        step_in_backward(model)
    loader: Any = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4)
    other: Any = DataLoader(TensorDataset(torch.randn(15, 8)), batch_size=5)
    if kind == "frozen":
        model.eval()
    graphs: list[Any] = []

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    step = torch.compile(optimizer.step, backend=count) if kind == "compiled" else optimizer.step
    for number, (batch,) in enumerate(loader):
        if kind == "late":
            model.train()
        model(batch).sum().backward()
        if kind != "backward":
            step()
        if number % 4 == 3:
            evaluate(model, other, kind)
            if kind in (
                "no_grad",
                "eval_mode",
                "first",
                "groups",
                "backward",
                "compiled",
                "sharded",
            ):
                model.train()
    if kind == "sharded":
        torch.distributed.destroy_process_group()
    return len(graphs), weakref.ref(model[0])


def main(kind: str) -> None:
    graphs, part = train(kind)
    gc.collect()
    print(graphs, "freed" if part() is None else "alive")


if __name__ == "__main__":
    main(sys.argv[1])
