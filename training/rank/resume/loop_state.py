"""Lightning's own state within an epoch: its loop counters, and the metrics that it accumulates.

Lightning resumes from the progress counters in a checkpoint's ``loops``. In a checkpoint from
``on_train_batch_end`` they say that the batch is processed but not completed. Lightning then
resumes with the next batch and skips a validation that was due in between, and with it the end of
the epoch. Therefore, if a validation is due or running, the counters are changed to those of a
running validation without a completed batch. On resume, Lightning runs that validation from its
first batch and then continues the epoch.

Lightning's checkpoints leave out the metrics that it accumulated since the epoch began. They are
means (maxima, sums) of values logged with ``on_epoch``, the states of torchmetrics, and the last
values that callbacks and schedulers read. Each rank has its own until the epoch ends. They also
leave out what a ModelCheckpoint saved last: after a resume it would save that step once more, and
not save what it had deferred to the next validation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ltui.training.rank import lightning_internals, torch_internals
from ltui.training.rank.lightning_internals import is_training_done, should_check_validation
from ltui.training.rank.resume.plain_data import is_plain_data, map_tensors, tensor_bytes
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


MetricState = dict[str, Any]
_MAX_STATE_BYTES = 64 << 20
"""Bytes of torchmetrics states to save. A metric that keeps every prediction has no upper bound."""


def logged_state(trainer: Any) -> MetricState:
    """Return what ``training_step`` and its hooks logged, and the last values of all metrics."""
    results = lightning_internals.training_results(trainer)
    names = {id(metric): name for name, metric in _named_metrics(trainer.lightning_module)}
    means = {}
    for key, result in results.items():
        if not result.meta.on_epoch or result.has_reset:
            continue
        mean: dict[str, Any] = {"how": _meta_fields(result.meta)}
        if result.is_tensor:
            size = getattr(result, "cumulated_batch_size", None)
            mean.update(value=_detached_copy(result.value), size=_detached_copy(size))
        elif (name := names.get(id(result.value))) is not None:
            mean["metric"] = name
        means[key] = mean
    last = {
        name: _detached_copy(lightning_internals.metric_table(trainer, name))
        for name in lightning_internals.METRIC_TABLES
    }
    return {"means": means, "last": {name: t for name, t in last.items() if is_plain_data(t)}}


def _meta_fields(meta: Any) -> dict[str, Any]:
    """Return how a value is logged, in plain values."""
    fields = {name: getattr(meta, name) for name in lightning_internals.RESULT_META_FIELDS}
    fields["reduce_fx"] = meta.reduce_fx.__name__
    fields["sync"] = [bool(meta.sync.should), bool(meta.sync.rank_zero_only)]
    return fields


def metric_states(module: Any) -> MetricState:
    """Return the state of every torchmetrics ``Metric`` in ``module`` that has been updated."""
    states, size = {}, 0
    for name, metric in _named_metrics(module):
        updates = torch_internals.update_count(metric)
        if not updates:
            continue
        keys = torch_internals.state_names(metric)
        state = {key: _detached_copy(getattr(metric, key)) for key in keys}
        size += tensor_bytes(state)
        if is_plain_data(state) and size <= _MAX_STATE_BYTES:
            states[name] = {"count": updates, "state": state}
    return states


def restore_metrics(module: Any, states: MetricState) -> None:
    """Put the values of ``metric_states`` back into the metrics that still have the same states."""
    device = getattr(module, "device", torch.device("cpu"))
    for name, metric in _named_metrics(module):
        saved = states.get(name)
        if saved is None or set(saved["state"]) != set(torch_internals.state_names(metric)):
            continue
        for key, value in saved["state"].items():
            setattr(metric, key, _to_device(value, device))
        torch_internals.mark_restored(metric, saved["count"])


def restore_logged(trainer: Any, saved: MetricState, *, over: bool) -> Callable[[], None]:
    """Restore a value of ``logged_state``.

    While the epoch continues, a saved mean joins the result of the same name when it is next
    logged. If the epoch has no batch left (``over``), all results are created at once. Return a
    function to call when the next epoch begins.
    """
    device = trainer.strategy.root_device
    for name, values in saved["last"].items():
        lightning_internals.metric_table(trainer, name).update(_to_device(values, device))
    results = lightning_internals.training_results(trainer)
    original_class, created = type(results), []
    if over:
        for key, mean in saved["means"].items():
            if (result := _create_result(trainer, results, mean)) is not None:
                results[key] = result
                created.append(key)
    elif saved["means"]:
        _join_when_logged(results, dict(saved["means"]), device)

    def forget() -> None:
        results.__class__ = original_class
        # Lightning compares how a name is logged now and before, including its functions.
        for key in created:
            results.pop(key, None)

    return forget


def _create_result(trainer: Any, results: Any, mean: dict[str, Any]) -> Any:
    """Create Lightning's result of one saved mean. Return None if its metric no longer exists."""
    device, fields = trainer.strategy.root_device, mean["how"]
    sync_dist, rank_zero_only = fields["sync"]
    result = lightning_internals.make_result_metric(
        results,
        fields,
        reduce_fx=fields["reduce_fx"],
        reduce=trainer.strategy.reduce,
        sync_dist=sync_dist,
        rank_zero_only=rank_zero_only,
        is_tensor="value" in mean,
    )
    if "value" in mean:
        _set_mean(result, mean, device)
    else:
        metrics = dict(_named_metrics(trainer.lightning_module))
        if (metric := metrics.get(mean.get("metric", ""))) is None:
            return None
        result.value = metric
    lightning_internals.mark_as_updated(result)
    return result


def _set_mean(result: Any, mean: dict[str, Any], device: torch.device) -> None:
    result.value = _to_device(mean["value"], device)
    if mean["size"] is not None:
        result.cumulated_batch_size = _to_device(mean["size"], device)


def _join_when_logged(results: Any, means: dict[str, Any], device: torch.device) -> None:
    """Give ``results`` a class that adds each saved mean to the result of its name."""
    original_class = type(results)

    class JoiningResults(original_class):  # type: ignore[misc, valid-type]
        """Lightning's results. A result starts with its saved mean when it is created."""

        def __setitem__(self, key: str, result: Any) -> None:
            super().__setitem__(key, result)
            saved = means.pop(key, None)
            if saved is not None and result.is_tensor and "value" in saved:
                _set_mean(result, saved, device)
            if not means:
                self.__class__ = original_class

    results.__class__ = JoiningResults


def checkpoint_saves(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return what each checkpoint callback saved last, by the name of its state."""
    callbacks = trainer.checkpoint_callbacks
    saves = {c.state_key: lightning_internals.last_saves(c) for c in callbacks}
    return {key: fields for key, fields in saves.items() if is_plain_data(fields)}


def restore_checkpoint_saves(trainer: Any, saves: dict[str, dict[str, Any]]) -> None:
    """Restore ``checkpoint_saves``, and the last file only where the callback still saves there."""
    for callback in trainer.checkpoint_callbacks:
        fields = dict(saves.get(callback.state_key, {}))
        file = fields.pop(lightning_internals.LAST_FILE_FIELD, "")
        folder = getattr(callback, "dirpath", None)
        if file and folder and Path(file).is_relative_to(folder):
            fields[lightning_internals.LAST_FILE_FIELD] = file
        lightning_internals.set_last_saves(callback, fields)


def _named_metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and object of each torchmetrics ``Metric`` in ``module``."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or module is None:
        return
    for name, part in module.named_modules():
        if isinstance(part, torchmetrics.Metric):
            yield name, part


def _detached_copy(value: Any) -> Any:
    """Return a copy that later updates do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [item.detach() if isinstance(item, torch.Tensor) else item for item in value]
    if isinstance(value, dict):
        return {key: _detached_copy(item) for key, item in value.items()}
    return value


def _to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device))
