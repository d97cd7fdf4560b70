"""Schedules of the learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch


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
