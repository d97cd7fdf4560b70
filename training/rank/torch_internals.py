"""The private attributes of torch and torchmetrics that ltui relies on, behind named functions.

Neither library makes a promise about these names. Only this module spells them, except for the
flight recorder, which has an adapter of its own (``flight_recorder.py``), and for single
ones in ``queue_writer.py``, ``ema.py`` and ``beton_writer.py``.
``tests/rank/test_library_internals.py`` asserts that each of those here exists on the installed
versions. All were seen in torch 2.15.0 and torchmetrics 1.9.0.

The functions only read, replace or build what they name. Decisions belong to the callers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


def require_exact_resume() -> None:
    """Raise ``AttributeError`` if a function that an exact resume always needs is missing.

    DDP's buckets have a check of their own (``can_reorder_parameters``).
    """
    # With a generator of its own, this draws nothing from the process's random states.
    loader = DataLoader([0], generator=torch.Generator())  # type: ignore[var-annotated, arg-type]
    yielded_batches(create_iterator(loader))
    parameter_norms([torch.zeros(1)])


# DataLoader.


def replace_get_iterator(loader: Any, function: Callable[[], Any]) -> None:
    """Have ``loader`` create its iterators with ``function``.

    Replaces ``DataLoader._get_iterator`` of this object.
    """
    loader._get_iterator = function


def restore_get_iterator(loader: Any) -> None:
    """Undo ``replace_get_iterator``."""
    loader.__dict__.pop("_get_iterator", None)


def call_after_iterator(loader: Any, function: Callable[[], None]) -> None:
    """Call ``function`` when ``loader`` has created its next iterator, and only then."""
    create = loader._get_iterator

    def create_and_call() -> Any:
        loader._get_iterator = create
        iterator = create()
        function()
        return iterator

    loader._get_iterator = create_and_call


def create_iterator(loader: Any) -> Any:
    """Call the ``_get_iterator`` of the loader's class."""
    return type(loader)._get_iterator(loader)


def loader_batch_size(iterator: Any) -> int | None:
    """Return the batch size of ``_BaseDataLoaderIter._index_sampler``; None if it has none."""
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def yielded_batches(iterator: Any) -> int:
    """Return ``_BaseDataLoaderIter._num_yielded``, the number of batches it has returned."""
    count: int = iterator._num_yielded
    return count


def persistent_iterator(loader: Any) -> Any:
    """Return ``DataLoader._iterator``, which ``persistent_workers`` keeps between epochs, or None.

    Objects of other classes may have no such attribute.
    """
    return getattr(loader, "_iterator", None)


def discard_iterator(loader: Any) -> None:
    """Shut down the workers of the loader's persistent iterator and forget the iterator.

    Uses ``_MultiProcessingDataLoaderIter._shutdown_workers``, which an iterator without workers
    does not have.
    """
    shut_down_workers = getattr(loader._iterator, "_shutdown_workers", None)
    if callable(shut_down_workers):
        shut_down_workers()
    loader._iterator = None


_next = _BaseDataLoaderIter.__next__


def wrap_loader_fetch(wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Replace ``_BaseDataLoaderIter.__next__``, by which every DataLoader hands out a batch."""
    _BaseDataLoaderIter.__next__ = wrap(_next)  # type: ignore[method-assign, assignment]


def unwrap_loader_fetch() -> None:
    """Undo ``wrap_loader_fetch``."""
    _BaseDataLoaderIter.__next__ = _next  # type: ignore[method-assign]


# DistributedDataParallel and its reducer.


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Return ``DistributedDataParallel._has_rebuilt_buckets``.

    It becomes True when DDP has ordered its buckets by the arrival of gradients.
    """
    return bool(model._has_rebuilt_buckets)


def rebuild_buckets(model: DistributedDataParallel) -> bool:
    """Order the buckets by the arrival of gradients, as the next forward pass would do first.

    Calls ``Reducer._rebuild_buckets``, a collective. Returns ``_has_rebuilt_buckets``.
    """
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True
    return bool(model._has_rebuilt_buckets)


def gradient_buckets(model: DistributedDataParallel) -> list[Any]:
    """Return the reducer's buckets with zeros as gradients.

    Calls ``Reducer._get_zeros_like_grad_buckets``, which allocates as much memory as all gradients
    take.
    """
    buckets: list[Any] = model.reducer._get_zeros_like_grad_buckets()
    return buckets


def push_all_parameters(model: DistributedDataParallel) -> None:
    """Mark the gradients of all parameters as arrived, in the order of the parameters.

    Calls ``Reducer._push_all_rebuilt_params``.
    """
    model.reducer._push_all_rebuilt_params()


def can_reorder_parameters(model: Any) -> bool:
    """Return True if the reducer may be rebuilt with its parameters in another order.

    A static graph, mixed precision, a Python reducer (``_use_python_reducer``) and delayed
    all-reduces (``_delay_all_reduce_params``) number the parameters elsewhere. A torch without
    ``Reducer._push_all_rebuilt_params`` can't reorder them either.
    """
    if model.static_graph or model.mixed_precision is not None or model._use_python_reducer:
        return False
    return not model._delay_all_reduce_params and hasattr(model.reducer, "_push_all_rebuilt_params")


def reducer_parameters(model: Any) -> tuple[list[Any], list[bool]]:
    """Return the parameters in the reducer's order, and for each whether its gradient is sparse.

    Calls ``DistributedDataParallel._build_params_for_reducer``.
    """
    parameters, expects_sparse = model._build_params_for_reducer()
    return parameters, expects_sparse


def rebuild_reducer(model: Any, parameters: list[Any], expects_sparse: list[bool]) -> None:
    """Replace the reducer by one that has ``parameters`` in this order.

    Calls ``DistributedDataParallel._ddp_init_helper`` with the mapping of
    ``_build_debug_param_to_name_mapping``.
    """
    model._ddp_init_helper(
        parameters,
        expects_sparse,
        model._build_debug_param_to_name_mapping(parameters),
        model.static_graph,
    )


# Parameters and schedulers.


def parameter_norms(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each tensor, on its device. Calls ``torch._foreach_norm``."""
    return list(torch._foreach_norm(parameters))


SCHEDULER_LAST_RATES = "_last_lr"
"""The list of ``LRScheduler`` that has the last learning rate of each parameter group."""


# torchmetrics.


def update_count(metric: Any) -> int:
    """Return ``Metric._update_count``, the number of updates since the last reset."""
    count: int = metric._update_count
    return count


def state_names(metric: Any) -> Any:
    """Return ``Metric._defaults``, whose keys are the names of the metric's states."""
    return metric._defaults


def mark_restored(metric: Any, updates: int) -> None:
    """Set ``Metric._update_count`` and clear the cached result ``Metric._computed``."""
    metric._update_count = updates
    metric._computed = None


# Profiler.


def is_profiling() -> bool:
    """Return True if a profiler is on in this process."""
    autograd: Any = torch.autograd
    return bool(autograd.profiler._is_profiler_enabled or autograd._profiler_enabled())


def call_before_profilers(function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` before another profiler gets ready. Return what ends that."""
    kind: Any = torch.autograd.profiler.profile
    prepare = kind._prepare_trace

    def prepare_trace(profiler: Any) -> None:
        function()
        prepare(profiler)

    kind._prepare_trace = prepare_trace

    def end() -> None:
        if kind._prepare_trace is prepare_trace:
            kind._prepare_trace = prepare

    return end
