"""What Lightning's loop counters must say for a resume to do the right thing.

Lightning resumes from the progress counters in a checkpoint's ``loops``. Saved in
``on_train_batch_end`` they say "this batch is processed, not completed", which resumes at the next
batch but skips a validation that was due in between, and with it the end of the epoch. So where a
validation is due or running, the checkpoint is written as Lightning knows one from the middle of a
validation of which no batch is done: resuming runs it from its first batch, then goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

_FIT = "fit_loop"
_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"

Amendment = Callable[[dict[str, Any]], None]


class Place(Enum):
    """Where in Lightning's loops a boundary is."""

    TRAINING = "training"
    """The end of a batch in which the optimizer stepped."""
    VALIDATION = "validation"
    """The end of a validation batch within ``fit``."""
    EVALUATION = "evaluation"
    """The end of a batch of ``validate``, ``test`` or ``predict``."""
    END = "end"
    """``on_train_end``."""


def place_allows(trainer: Any, place: Place) -> bool:
    """Whether ranks may act here. Asked only while there is a request.

    After the last batch of an epoch (or of the training) without a validation to come, Lightning
    can't resume to the epoch's end hooks: the next batch is as near, and after the last step the
    run is done.
    """
    if place is not Place.TRAINING:
        return True
    loop = trainer.fit_loop.epoch_loop
    if not loop._is_training_done or validation_is_due(trainer):
        return True
    steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    return trainer.num_training_batches == 1 and not steps_done


def validation_is_due(trainer: Any) -> bool:
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def amendment(trainer: Any, place: Place) -> Amendment | None:
    """What to change in a checkpoint that is dumped at ``place``."""
    if place is Place.VALIDATION:
        return _validation_to_begin
    if place is Place.TRAINING and validation_is_due(trainer):
        return _batch_completed_validation_to_begin
    return None


def _batch_completed_validation_to_begin(checkpoint: dict[str, Any]) -> None:
    batches = checkpoint["loops"][_FIT][_BATCHES]
    for scope in ("total", "current"):
        batches[scope]["completed"] = batches[scope]["processed"]
    _validation_to_begin(checkpoint)


def _validation_to_begin(checkpoint: dict[str, Any]) -> None:
    validation = checkpoint["loops"][_FIT][_VALIDATION]
    for scope in ("total", "current"):
        validation[scope].update(ready=1, started=1, processed=0, completed=0)
    validation["is_last_batch"] = False
