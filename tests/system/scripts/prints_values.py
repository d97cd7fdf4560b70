"""Trains one process and prints ``step N loss X`` after each step: ``prints_values.py STEPS``."""

from __future__ import annotations

import sys

import torch


def main(steps: int) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        loss = model(torch.randn(4, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, "loss", loss.item())


if __name__ == "__main__":
    main(int(sys.argv[1]))
