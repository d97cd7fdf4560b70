"""Weight decay, and schedules of the learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def one_cycle(optimizer: torch.optim.Optimizer, peak: float, trainer: Any) -> dict[str, Any]:
    """Return ``optimizer`` with a one-cycle schedule, as a result for ``configure_optimizers``.

    The learning rate rises to ``peak`` and falls again over all steps of the trainer. It is
    constant if the number of steps is unknown.
    """
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps < 2:
        return {"optimizer": optimizer}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=int(steps))
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step"},
    }


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups. Norms and biases have no weight decay."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
