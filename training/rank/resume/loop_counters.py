"""Lightning's loop counters, and how a checkpoint must contain them for a correct resume.

Lightning resumes from the progress counters in a checkpoint's ``loops``. In a checkpoint from
``on_train_batch_end`` they say that the batch is processed but not completed. Lightning then
resumes with the next batch and skips a validation that was due in between, and with it the end of
the epoch. Therefore, if a validation is due or running, the counters are changed to those of a
running validation without a completed batch. On resume, Lightning runs that validation from its
first batch and then continues the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from ltui.training.rank.lightning_internals import is_training_done, should_check_validation
from ltui.training.rank.torch_internals import parameter_norms

_FIT = "fit_loop"
_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"

CheckpointAmendment = Callable[[dict[str, Any]], None]
"""Changes the dictionary of a checkpoint before it is written."""


class BoundaryKind(Enum):
    """The part of Lightning's loops in which a boundary is."""

    TRAINING = "training"
    """The end of a batch in which the optimizer stepped."""
    VALIDATION = "validation"
    """The end of a validation batch within ``fit``."""
    EVALUATION = "evaluation"
    """The end of a batch of ``validate``, ``test`` or ``predict``."""
    END = "end"
    """The end of an epoch after its last hook, or of training before ``on_train_end``."""
    PROGRAM = "program"
    """The end of a step of a program without a Trainer that can save a checkpoint."""


def can_act_at(trainer: Any, boundary: BoundaryKind) -> bool:
    """Return True if ranks may stop, pause or save at this boundary.

    After the last batch of an epoch (or of training) without a following validation, Lightning
    can't resume with the hooks of the epoch's end. Then the next boundary is used, or, after the
    last step, the run is finished anyway. Called only while there is a request.
    """
    if boundary is not BoundaryKind.TRAINING:
        return True
    loop = trainer.fit_loop.epoch_loop
    if not is_training_done(loop) or validation_is_due(trainer):
        return True
    return trainer.num_training_batches == 1 and not _are_steps_done(trainer)


def is_fit_finished(trainer: Any) -> bool:
    """Return True if no epoch follows, so there is nothing left to stop."""
    epochs = trainer.fit_loop.epoch_progress.current.completed
    epochs_done = trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs
    return bool(_are_steps_done(trainer) or epochs_done or trainer.should_stop)


def _are_steps_done(trainer: Any) -> bool:
    return trainer.max_steps != -1 and bool(trainer.global_step >= trainer.max_steps)


def validation_is_due(trainer: Any) -> bool:
    """Return True if a validation follows the present batch."""
    return should_check_validation(trainer.fit_loop)


def checkpoint_amendment(trainer: Any, boundary: BoundaryKind) -> CheckpointAmendment | None:
    """Return the change that a checkpoint of this boundary needs, or None if it needs none."""
    if boundary is BoundaryKind.VALIDATION:
        if weight_averaging_callback(trainer):
            return _restart_validation_with_average
        return _restart_validation
    if boundary is BoundaryKind.TRAINING and validation_is_due(trainer):
        return _complete_batch_and_start_validation
    return None


def _complete_batch_and_start_validation(checkpoint: dict[str, Any]) -> None:
    batches = checkpoint["loops"][_FIT][_BATCHES]
    for scope in ("total", "current"):
        batches[scope]["completed"] = batches[scope]["processed"]
    _restart_validation(checkpoint)


def _restart_validation(checkpoint: dict[str, Any]) -> None:
    """Set the counters of a validation that has begun and has completed no batch."""
    validation = checkpoint["loops"][_FIT][_VALIDATION]
    for scope in ("total", "current"):
        validation[scope].update(ready=1, started=1, processed=0, completed=0)
    validation["is_last_batch"] = False


def _restart_validation_with_average(checkpoint: dict[str, Any]) -> None:
    """Restart the validation, and exchange trained and averaged weights.

    During validation, Lightning's ``WeightAveraging`` has swapped the two.
    """
    _restart_validation(checkpoint)
    if "current_model_state" in checkpoint:
        swapped = checkpoint["state_dict"], checkpoint["current_model_state"]
        checkpoint["current_model_state"], checkpoint["state_dict"] = swapped


def weight_averaging_callback(trainer: Any) -> Any:
    """Return Lightning's callback that validates with averaged weights, or None."""
    for callback in trainer.callbacks:
        if any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__):
            return callback
    return None


class TrainedWeightsCheck:
    """Detects that another callback has swapped other weights, such as an average, into the module.

    Such a callback keeps the trained weights elsewhere, so a checkpoint would not contain them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._norms: list[torch.Tensor] | None = None

    def record(self) -> None:
        """Record the trained weights' norms before a validation, without waiting for the device."""
        self._norms = self._read_norms()

    def are_in_place(self) -> bool:
        """Return True if the norms are those of ``record``. May wait for the device."""
        if self._norms is None or weight_averaging_callback(self._trainer) is not None:
            return True
        current = self._read_norms()
        if current is None or len(current) != len(self._norms):
            return True
        pairs = zip(self._norms, current, strict=True)
        return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)

    def _read_norms(self) -> list[torch.Tensor] | None:
        module = self._trainer.lightning_module
        # Each rank has only a part of a sharded parameter; its norm would take a collective.
        parameters = [p.detach() for p in module.parameters() if type(p) is torch.nn.Parameter]
        parameters = [p for p in parameters if p.is_floating_point() and p.numel()]
        return parameter_norms(parameters) if parameters else None
