"""What Lightning's loop counters must say for a resume to do the right thing.

Lightning resumes from the progress counters in a checkpoint's ``loops``. SaveResult in
``on_train_batch_end`` they say "this batch is processed, not completed", which resumes at the next
batch but skips a validation that was due in between, and with it the end of the epoch. So where a
validation is due or running, the checkpoint is written as Lightning knows one from the middle of a
validation of which no batch is done: resuming runs it from its first batch, then goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

_FIT = "fit_loop"
_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"

CheckpointAmendment = Callable[[dict[str, Any]], None]


class BoundaryKind(Enum):
    """Where in Lightning's loops a boundary is."""

    TRAINING = "training"
    """The end of a batch in which the optimizer stepped."""
    VALIDATION = "validation"
    """The end of a validation batch within ``fit``."""
    EVALUATION = "evaluation"
    """The end of a batch of ``validate``, ``test`` or ``predict``."""
    END = "end"
    """Training is over, after the last epoch's hooks and before ``on_train_end``."""


def can_act_at(trainer: Any, place: BoundaryKind) -> bool:
    """Whether ranks may act here. Asked only while there is a request.

    After the last batch of an epoch (or of the training) without a validation to come, Lightning
    can't resume to the epoch's end hooks: the next batch is as near, and after the last step the
    run is done.
    """
    if place is not BoundaryKind.TRAINING:
        return True
    loop = trainer.fit_loop.epoch_loop
    if not loop._is_training_done or validation_is_due(trainer):
        return True
    steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    return trainer.num_training_batches == 1 and not steps_done


def check_loops(trainer: Any) -> None:
    """Raise ``TypeError`` or ``AttributeError`` if Lightning's loops are not those known here."""
    loop = trainer.fit_loop.epoch_loop
    inspect.signature(loop._should_check_val_fx).bind(None)


def validation_is_due(trainer: Any) -> bool:
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def checkpoint_amendment(trainer: Any, place: BoundaryKind) -> CheckpointAmendment | None:
    """What to change in a checkpoint that is dumped at ``place``."""
    if place is BoundaryKind.VALIDATION:
        return (
            _validation_to_begin_with_average
            if weight_averaging_callback(trainer)
            else _validation_to_begin
        )
    if place is BoundaryKind.TRAINING and validation_is_due(trainer):
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


def _validation_to_begin_with_average(checkpoint: dict[str, Any]) -> None:
    """Within validation Lightning's ``WeightAveraging`` has swapped the two."""
    _validation_to_begin(checkpoint)
    if "current_model_state" in checkpoint:
        swapped = checkpoint["state_dict"], checkpoint["current_model_state"]
        checkpoint["current_model_state"], checkpoint["state_dict"] = swapped


def weight_averaging_callback(trainer: Any) -> Any:
    """Lightning's callback that validates with averaged weights, where there is one."""
    for callback in trainer.callbacks:
        if any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__):
            return callback
    return None


class TrainedWeightsCheck:
    """Whether the module holds the weights that are trained, or something else for validation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._norms: list[torch.Tensor] | None = None

    def note(self) -> None:
        """A validation is about to begin. Nothing waits for the device."""
        self._norms = self._read()

    def are_in_place(self) -> bool:
        """Compared by their norms, which a swap changes; may wait for the device."""
        if self._norms is None or weight_averaging_callback(self._trainer) is not None:
            return True
        now = self._read()
        if now is None or len(now) != len(self._norms):
            return True
        pairs = zip(self._norms, now, strict=True)
        return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)

    def _read(self) -> list[torch.Tensor] | None:
        module = self._trainer.lightning_module
        # Of a sharded parameter each rank would see its part, by a collective.
        parameters = [p.detach() for p in module.parameters() if type(p) is torch.nn.Parameter]
        parameters = [p for p in parameters if p.is_floating_point() and p.numel()]
        return list(torch._foreach_norm(parameters)) if parameters else None
