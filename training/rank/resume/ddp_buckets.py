"""Keep the order of gradients in DDP's buckets when a run resumes.

DDP puts gradients into buckets by one rule in the first step of a process. Then it rebuilds the
buckets once, in the order in which the gradients arrived in that step, and keeps them. A gradient's
place in its bucket decides in which order the ranks' values are added. With two ranks this changes
nothing; with more, it changes the last bits. Therefore a resumed process gets the checkpoint's
bucket layout before its first step.

Torch has no public way to set the layout. Its own rule builds the buckets from the parameters in
their order of arrival. So this module creates the reducer again with the parameters in that order
and marks all gradients as arrived.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ltui.training.rank import torch_internals
from ltui.training.rank.file_transfer import broadcast, gather
from ltui.training.rank.lightning_internals import call_after_model_setup

MIN_RANKS = 3
"""Smallest number of ranks with which the order matters: the sum of two values has no order."""

Layout = list[list[str]]
"""The names of the parameters in each bucket, in the reducer's order."""


class DdpBuckets:
    """Reads and restores the DDP gradient bucket layout of a trainer's model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._layout: Layout | None = None
        self.may_differ = False
        """True if training continued with other buckets than the checkpoint's, on any rank."""

    def layout(self) -> Layout | None:
        """Return the bucket layout for the next step.

        The list is empty for DDP's initial layout. The result is None if the layout is unknown.
        After the first step this rebuilds the buckets, as the next step would. That is a
        collective: all ranks must call it.
        """
        model = self._trainer.strategy.model
        if not isinstance(model, DistributedDataParallel) or not self._does_order_matter:
            return []
        try:
            if self._layout is None:
                if not (
                    torch_internals.has_rebuilt_buckets(model)
                    or torch_internals.rebuild_buckets(model)
                ):
                    return []
                self._layout = read_bucket_layout(model)
        except (AttributeError, TypeError, RuntimeError):  # another version of torch
            return None
        return self._layout

    @property
    def _does_order_matter(self) -> bool:
        return bool(self._trainer.world_size >= MIN_RANKS)

    def apply_on_wrap(self, layout: Layout | None) -> None:
        """Apply ``layout`` when Lightning next wraps the model in DDP.

        All ranks must call it. The layout of rank 0 is used on all of them.
        """

        def apply(model: Any) -> None:
            if isinstance(model, DistributedDataParallel):
                self.may_differ = not apply_bucket_layout(model, layout)

        if self._does_order_matter:
            call_after_model_setup(self._trainer.strategy, apply)


def read_bucket_layout(model: DistributedDataParallel) -> Layout | None:
    """Return the present layout of the reducer, or None if a GPU has too little free memory.

    This temporarily needs as much memory as the gradients take.
    """
    names = {id(p): name for name, p in model.module.named_parameters()}
    if not _has_memory_for_gradients(model):
        return None
    buckets = torch_internals.gradient_buckets(model)
    return [[names[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _has_memory_for_gradients(model: DistributedDataParallel) -> bool:
    parameters = [p for p in model.module.parameters() if p.requires_grad and p.is_cuda]
    if not parameters:
        return True
    device = parameters[0].device
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bool(free > 2 * sum(p.nbytes for p in parameters))


def apply_bucket_layout(model: DistributedDataParallel, layout: Layout | None) -> bool:
    """Give ``model``, which has done no step, rank 0's ``layout``. Return True if it has it now.

    All ranks must call it. Their buckets must never differ, so each change is made by all ranks or
    by none.
    """
    layout = broadcast(layout)
    if not layout:
        return layout is not None
    original = model.reducer, model.logger
    try:
        rebuilt = _rebuild_reducer_in_order(model, layout)
    except Exception:  # noqa: BLE001  (another torch: training matters more than the last bits)
        rebuilt = False
    if not all(gather(rebuilt)):
        model.reducer, model.logger = original
        return False
    del original
    torch_internals.push_all_parameters(model)
    torch_internals.rebuild_buckets(model)
    return all(gather(read_bucket_layout(model) == layout))


def _rebuild_reducer_in_order(model: Any, layout: Layout) -> bool:
    """Create the reducer again with its parameters in the order of ``layout``.

    Return False if this model or this version of torch does not allow that.
    """
    if not torch_internals.can_reorder_parameters(model):
        return False
    parameters, expects_sparse = torch_internals.reducer_parameters(model)
    names = {id(p): name for name, p in model.module.named_parameters()}
    numbers = {names[id(p)]: number for number, p in enumerate(parameters)}
    order = [numbers.get(name) for bucket in layout for name in bucket]
    if sorted(number for number in order if number is not None) != list(range(len(parameters))):
        return False
    torch_internals.rebuild_reducer(
        model,
        [parameters[number] for number in order if number is not None],
        [expects_sparse[number] for number in order if number is not None],
    )
    return True
