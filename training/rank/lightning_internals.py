"""The private attributes of Lightning that ltui relies on, each behind one named function.

Lightning makes no promise about these names: a release may rename any of them. This module is the
only one that spells them, so that support for another release starts here.
``tests/rank/test_library_internals.py`` asserts that each of them exists on the installed version.

The docstrings name the attribute. Unless one says otherwise, the attribute has the same name and
meaning in Lightning 2.5.0 and 2.6.6, the oldest supported and the tested version.

The functions only read, replace or build what they name. Decisions belong to the callers. Code that
runs for every batch calls a function here once, when training begins, and keeps the result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

METRIC_TABLES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Names of the logger connector's dictionaries of last values. Checkpoints contain these names."""
RESULT_META_FIELDS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)
"""Fields of a result's metadata that are plain values. Checkpoints contain these names."""

LAST_FILE_FIELD = "_last_checkpoint_saved"
"""The attribute of a ModelCheckpoint with the path of the last file."""
SAVE_FIELDS = ("_last_global_step_saved", LAST_FILE_FIELD, "_defer_save_until_validation")
"""Attributes of a ModelCheckpoint that its state leaves out. Checkpoints contain these names.

2.5.0 has no ``_defer_save_until_validation``.
"""

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


def require_exact_resume(trainer: Any) -> None:
    """Raise ``AttributeError`` or ``TypeError`` if an attribute for an exact resume is missing.

    Call it in ``setup``, before any of them is replaced.
    """
    loop = trainer.fit_loop
    for name in (
        "_load_combined_loader_states",
        "_combined_loader",
        "_data_fetcher",
        "_restarting",
    ):
        getattr(loop, name)
    for name in METRIC_TABLES:
        metric_table(trainer, name)
    built = make_result_metric(
        training_results(trainer),
        {**dict.fromkeys(RESULT_META_FIELDS), "name": "loss", "on_epoch": True},
        reduce_fx="mean",
        reduce=max,
        sync_dist=False,
        rank_zero_only=False,
        is_tensor=True,
    )
    for name in ("value", "cumulated_batch_size", "has_reset", "_update_count", "_defaults"):
        getattr(built, name)
    for name in RESULT_META_FIELDS:
        getattr(built.meta, name)
    is_synchronised(built.meta)


# Connectors of the Trainer.


def logger_connector(trainer: Any) -> Any:
    """Return ``Trainer._logger_connector``, which collects logged values and runs batch hooks.

    Its methods ``on_batch_start``, ``on_batch_end``, ``update_train_step_metrics`` and
    ``log_metrics`` are used.
    """
    return trainer._logger_connector


def checkpoint_connector(trainer: Any) -> Any:
    """Return ``Trainer._checkpoint_connector``, which builds and restores checkpoints.

    Its methods ``dump_checkpoint``, ``resume_start`` and ``restore_optimizers_and_schedulers`` are
    used.
    """
    return trainer._checkpoint_connector


def loaded_checkpoint(connector: Any) -> dict[str, Any]:
    """Return ``_CheckpointConnector._loaded_checkpoint``, the dictionary that is being restored.

    It is only reported, so the result is empty if there is no such attribute.
    """
    checkpoint: dict[str, Any] = getattr(connector, "_loaded_checkpoint", {})
    return checkpoint


def signal_connector(trainer: Any) -> Any:
    """Return ``Trainer._signal_connector``; its ``register_signal_handlers`` is used."""
    return trainer._signal_connector


# Logged values.


def active_results(trainer: Any) -> Any:
    """Return ``Trainer._results``, the results of the loop that runs now, or None."""
    return trainer._results


def training_results(trainer: Any) -> Any:
    """Return ``_TrainingEpochLoop._results``, the results that ``training_step`` logged.

    Its method ``metrics(on_step)`` returns the present values, those for loggers under ``log``.
    """
    return trainer.fit_loop.epoch_loop._results


def callback_table(connector: Any) -> dict[str, Any]:
    """Return ``_LoggerConnector._callback_metrics`` without computing any metric.

    The public ``Trainer.callback_metrics`` computes pending metrics, which may be a collective.
    """
    metrics: dict[str, Any] = connector._callback_metrics
    return metrics


def is_within_batch(connector: Any) -> bool:
    """Return True between the start of the first batch of a loop and the end of its last one.

    Reads ``_LoggerConnector._first_loop_iter``.
    """
    return connector._first_loop_iter is not None


def is_accumulating(trainer: Any) -> bool:
    """Return True if the last batch of the ``fit`` only accumulated gradients.

    Uses ``_TrainingEpochLoop._should_accumulate``. A logger then has the number of the next step.
    """
    if trainer.state.fn != "fit" or not trainer.lightning_module.automatic_optimization:
        return False
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def metric_table(trainer: Any, name: str) -> dict[str, Any]:
    """Return one of ``METRIC_TABLES`` from the logger connector, to be updated in place."""
    table: dict[str, Any] = getattr(trainer._logger_connector, name)
    return table


def is_synchronised(meta: Any) -> bool:
    """Return ``_Sync.should``: True if ranks synchronise the value (``sync_dist=True``).

    ``meta`` is the metadata of one result.
    """
    return bool(meta.sync.should)


def make_result_metric(
    results: Any,
    fields: dict[str, Any],
    *,
    reduce_fx: str,
    reduce: Function,
    sync_dist: bool,
    rank_zero_only: bool,
    is_tensor: bool,
) -> Any:
    """Build the ``_ResultMetric`` of one logged name, with no value yet.

    Uses ``_Metadata``, ``_Sync`` and ``_ResultMetric`` of the module that defines the class of
    ``results``. ``fields`` has the keys ``RESULT_META_FIELDS``.
    """
    module = sys.modules[type(results).__module__]
    meta = module._Metadata(
        reduce_fx=reduce_fx, **{name: fields[name] for name in RESULT_META_FIELDS}
    )
    meta.sync = module._Sync(fn=reduce, _should=sync_dist, rank_zero_only=rank_zero_only)
    return module._ResultMetric(meta, is_tensor)


def mark_as_updated(result: Any) -> None:
    """Set ``_ResultMetric._update_count`` (inherited from torchmetrics), so that it may compute."""
    result._update_count = 1


def last_saves(callback: Any) -> dict[str, Any]:
    """Return the ``SAVE_FIELDS`` that a callback has: what a ModelCheckpoint saved last, and
    whether the next validation saves."""
    return {name: getattr(callback, name) for name in SAVE_FIELDS if hasattr(callback, name)}


def set_last_saves(callback: Any, fields: dict[str, Any]) -> None:
    """Set those of the ``SAVE_FIELDS`` that ``fields`` has."""
    for name in SAVE_FIELDS:
        if name in fields:
            setattr(callback, name, fields[name])


# Loops and loaders.


def combined_loader(fit_loop: Any) -> Any:
    """Return ``_FitLoop._combined_loader``: the training loaders, None before their setup."""
    return fit_loop._combined_loader


def data_fetcher(fit_loop: Any) -> Any:
    """Return ``_FitLoop._data_fetcher``, which iterates over the combined loader.

    Its attributes ``batches`` (fetched ahead), ``fetched``, ``done`` and ``iterator`` are used.
    """
    return fit_loop._data_fetcher


def loader_iterator(fetcher: Any, index: int) -> Any:
    """Return the iterator of the training loader with the number ``index``.

    Uses ``_DataFetcher.iterator``, an iterator over the ``CombinedLoader``, whose ``_iterator`` is
    the ``_ModeIterator`` that has the list ``iterators``.
    """
    combined = fetcher.iterator
    combined = getattr(combined, "_iterator", combined)
    return combined.iterators[index]


def replace_load_loader_states(fit_loop: Any, function: Function) -> Function:
    """Replace ``_FitLoop._load_combined_loader_states`` of this object, and return the original.

    Lightning calls it when the loaders exist and before they are iterated.
    """
    original: Function = fit_loop._load_combined_loader_states
    fit_loop._load_combined_loader_states = function
    return original


def is_state_loaded(loop: Any) -> bool:
    """Return ``_Loop._loaded_from_state_dict``: True if a checkpoint's counters were loaded.

    Without that attribute, ``_Loop.restarting`` is the nearest substitute.
    """
    return bool(getattr(loop, "_loaded_from_state_dict", loop.restarting))


def is_resuming(fit_loop: Any) -> bool:
    """Return True if the loaders were already iterated for the epoch that begins.

    Uses ``_FitLoop.is_resuming``, which 2.6.6 has and 2.5.0 does not. There, the epoch loop's
    ``restarting`` alone decides.
    """
    return bool(getattr(fit_loop, "is_resuming", False) or fit_loop.epoch_loop.restarting)


def clear_resuming(fit_loop: Any) -> None:
    """Make Lightning treat the epoch that begins as a new one, with new iterators.

    Sets ``_FitLoop._resuming_from_checkpoint`` (2.6.6; 2.5.0 does not read it) and
    ``_Loop._restarting``.
    """
    fit_loop._resuming_from_checkpoint = fit_loop._restarting = False
    fit_loop.epoch_loop.restarting = False


def is_training_done(epoch_loop: Any) -> bool:
    """Return ``_TrainingEpochLoop._is_training_done``: no batch of this epoch follows."""
    return bool(epoch_loop._is_training_done)


def should_check_validation(fit_loop: Any) -> bool:
    """Return ``_TrainingEpochLoop._should_check_val_fx()``: a validation follows this batch."""
    return bool(fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher))


def check_validation_signature(fit_loop: Any) -> None:
    """Raise ``TypeError`` unless ``_should_check_val_fx`` takes the data fetcher.

    Lightning 2.0 had the same method without an argument.
    """
    inspect.signature(fit_loop.epoch_loop._should_check_val_fx).bind(None)


# Places inside a training step.


def wrap_fetch_hooks(
    epoch_loop: Any, wrap: Callable[[Function, Function], tuple[Function, Function]]
) -> None:
    """Replace ``_TrainingEpochLoop._on_before_fetch`` and ``_on_after_fetch`` by ``wrap`` of them.

    Lightning calls them around ``next(iterator)`` to profile the wait for data.
    """
    hooks = wrap(epoch_loop._on_before_fetch, epoch_loop._on_after_fetch)
    epoch_loop._on_before_fetch, epoch_loop._on_after_fetch = hooks


def wrap_after_closure(precision: Any, wrap: Wrapper) -> None:
    """Replace ``Precision._after_closure`` of this precision plugin by ``wrap`` of it.

    Lightning calls it after the backward pass and before the optimizer's step.
    """
    precision._after_closure = wrap(precision._after_closure)


def wrap_after_manual_step(manual_optimization: Any, wrap: Wrapper) -> None:
    """Replace ``_ManualOptimization._on_after_step`` of this object by ``wrap`` of it.

    Lightning calls it after each manual optimizer step.
    """
    manual_optimization._on_after_step = wrap(manual_optimization._on_after_step)


def silence_idle_profiler(trainer: Any) -> bool:
    """Make Lightning's do-nothing profiler free of cost. Return True if that profiler is in use.

    ``PassThroughProfiler`` does nothing, but its context managers around every hook take about
    fifty microseconds per step. Another profiler, also one that is set later, stays as it is.
    """
    profiler = trainer.profiler
    cls = type(profiler)
    from_lightning = cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    if not from_lightning or cls.__name__ != "PassThroughProfiler":
        return False
    profiler.profile = contextlib.nullcontext  # yields the action's name, as ``profile`` does
    return True


# Strategy and samplers.


def call_after_model_setup(strategy: Any, function: Callable[[Any], None]) -> None:
    """Call ``function`` with the model that ``Strategy._setup_model`` next wraps in DDP.

    Do nothing for a strategy without that method.
    """
    setup = getattr(strategy, "_setup_model", None)
    if setup is None:
        return

    @functools.wraps(setup)
    def setup_and_call(*args: Any, **kwargs: Any) -> Any:
        vars(strategy).pop("_setup_model", None)
        model = setup(*args, **kwargs)
        function(model)
        return model

    strategy._setup_model = setup_and_call


def wrapped_sampler(sampler: Any) -> Any:
    """Return the user's sampler inside Lightning's ``DistributedSamplerWrapper``, else None.

    Uses ``_DatasetSamplerWrapper._sampler``; the wrapper's ``dataset`` is that object.
    """
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


# Fabric.

FABRIC_PASSES = "_num_iter_calls"
"""The attribute of ``_FabricDataLoader`` that counts its passes."""


def fabric_loader(loader: Any) -> Any:
    """Return the DataLoader inside of a ``_FabricDataLoader``; None for any other object."""
    if type(loader).__name__ != "_FabricDataLoader" or FABRIC_PASSES not in vars(loader):
        return None
    return loader._dataloader
