"""Trains without a Trainer for 12 steps, and evaluates after every fourth, as ``KIND`` says.

no_grad: fetches its evaluation's batches without gradients. eval_mode: only the model is in
evaluation mode, which it leaves before the next batch. late: which it leaves after it has fetched
the next batch, as the Hugging Face Trainer does. frozen: it trains in evaluation mode. groups: the
first group of its optimizer is empty.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

EVALUATION_S = 0.3


def evaluate(model: torch.nn.Module, loader: Any, kind: str) -> None:
    model.eval()
    with torch.set_grad_enabled(kind != "no_grad"):
        for (batch,) in loader:
            with torch.no_grad():
                model(batch)
            time.sleep(EVALUATION_S / 3)


def main(kind: str) -> None:
    model = torch.nn.Linear(8, 2)
    empty = [{"params": []}] if kind == "groups" else []
    optimizer = torch.optim.SGD([*empty, {"params": list(model.parameters())}], lr=0.01)
    loader: Any = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4)
    other: Any = DataLoader(TensorDataset(torch.randn(15, 8)), batch_size=5)
    if kind == "frozen":
        model.eval()
    for number, (batch,) in enumerate(loader):
        if kind == "late":
            model.train()
        model(batch).sum().backward()
        optimizer.step()
        if number % 4 == 3:
            evaluate(model, other, kind)
            if kind in ("no_grad", "eval_mode", "groups"):
                model.train()


if __name__ == "__main__":
    main(sys.argv[1])
