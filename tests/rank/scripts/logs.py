"""Trains a model of one weight for four steps, and calls ``log(step, value)`` of the named module.

    logs.py MODULE

Before and after the training, the step is given as 0 and 4.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def main(module: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    module.log(0, 0.5)
    for step in range(1, 5):
        weight.grad = torch.ones(1)
        optimizer.step()
        module.log(step, float(step))
    module.end()


if __name__ == "__main__":
    main(importlib.import_module(sys.argv[1]))
