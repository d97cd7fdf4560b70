"""Trains without an optimizer of torch, and prints: ``own_updates.py STEPS SECONDS_PER_STEP``."""

from __future__ import annotations

import sys
import time

import torch


def main(steps: int, seconds: float) -> None:
    weight = torch.zeros(4, requires_grad=True)
    for step in range(1, steps + 1):
        loss = (weight - 1).pow(2).mean()
        loss.backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        print(f"| batch {step} | loss {loss.item():5.3f} | valid loss 2.5 ", flush=True)
        time.sleep(seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
