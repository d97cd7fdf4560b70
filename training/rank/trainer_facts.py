"""What a Trainer says of itself: who its rank is, and how many steps its training will have."""

from __future__ import annotations

import math
from typing import Any

from ltui.training.rank.channel import Channel
from ltui.training.rank.lightning_version import lightning_version
from ltui.training.shared.record_types import RecordKind


def send_hello(channel: Channel, trainer: Any) -> None:
    """Send who this rank is."""
    channel.send_hello(
        trainer.strategy.root_device,
        trainer.local_rank,
        trainer.world_size,
        lightning=lightning_version(trainer),
        strategy=type(trainer.strategy).__name__,
        precision=str(trainer.precision),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
    )


def send_plan(channel: Channel, trainer: Any) -> None:
    """Send how many steps, epochs and batches the training will have."""
    batches = trainer.num_training_batches
    max_epochs = _limit(trainer.max_epochs)
    channel.send_record(
        RecordKind.PLAN,
        max_steps=_planned_steps(trainer, batches, max_epochs),
        max_epochs=max_epochs,
        batches_per_epoch=_limit(batches),
        val_batches=_validation_batches(trainer),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
    )


def _planned_steps(trainer: Any, batches: float, max_epochs: int | None) -> int | None:
    """Return the optimizer steps until the end of training; None if there is no limit.

    The result is the smaller of the limits by steps and by epochs.
    """
    limits = []
    if (max_steps := _limit(trainer.max_steps)) is not None:
        limits.append(max_steps)
    automatic = trainer.lightning_module.automatic_optimization
    if max_epochs is not None and math.isfinite(batches) and automatic:
        limits.append(math.ceil(batches / trainer.accumulate_grad_batches) * max_epochs)
    return min(limits, default=None)


def _validation_batches(trainer: Any) -> int | None:
    if not trainer.enable_validation:
        return 0
    batches = trainer.num_val_batches
    return _limit(sum(batches) if isinstance(batches, list) else batches)


def _limit(value: float | None) -> int | None:
    """Return a limit, or None for Lightning's values without a limit: None, -1 and infinity."""
    return None if value is None or value < 0 or not math.isfinite(value) else int(value)
