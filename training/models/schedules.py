"""How the learning rate moves over a training."""

from __future__ import annotations

import math
from typing import Any

import torch


def one_cycle(optimizer: torch.optim.Optimizer, peak: float, trainer: Any) -> dict[str, Any]:
    """Up to ``peak`` and down again, step by step, over what the trainer will do; constant where it
    has no end. For ``configure_optimizers`` to return."""
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps < 2:
        return {"optimizer": optimizer}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=int(steps))
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step"},
    }
