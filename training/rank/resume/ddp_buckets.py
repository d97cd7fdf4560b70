"""The places of gradients in DDP's buckets, kept over a resume.

DDP puts gradients into buckets by one rule in a process's first step, then anew by the order in
which they arrived in it, once for the whole training. A gradient's place in its bucket decides in
which order the ranks' parts are added, which changes nothing for two ranks and the last bits for
more. So a resumed process is given the buckets that the checkpoint's had, before its first step.

Torch offers no way to say them. Its own rule yields them from parameters in their order of arrival,
so the reducer is made anew with its parameters in that order and told that all have arrived.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MIN_RANKS = 3
"""Two numbers have the same sum in either order."""

Layout = list[list[str]]
"""The names of the parameters in each bucket, in the reducer's order."""


class DdpBuckets:
    """Those of one Trainer's model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._known: Layout | None = None
        self.may_differ = False
        """Whether training went on with other buckets than the checkpoint's, on any rank."""

    def layout(self) -> Layout | None:
        """As the next step uses them; empty where they are those of a new process, None where they
        can't be known. A collective of all ranks after the first step, as the next step would do
        it."""
        model = self._model()
        if model is None:
            return []
        try:
            if self._known is None:
                if not (model._has_rebuilt_buckets or _rebuild(model)):
                    return []
                self._known = read_bucket_layout(model)
        except (AttributeError, TypeError, RuntimeError):  # another torch
            return None
        return self._known

    def _model(self) -> DistributedDataParallel | None:
        model = self._trainer.strategy.model
        concerned = isinstance(model, DistributedDataParallel)
        return model if concerned and self._trainer.world_size >= MIN_RANKS else None

    def give(self, layout: Layout | None) -> None:
        """Have the model that is wrapped next begin with ``layout``; rank 0's holds for all. All
        ranks call it."""
        strategy = self._trainer.strategy
        wrap = getattr(strategy, "_setup_model", None)
        if wrap is None or self._trainer.world_size < MIN_RANKS:
            return

        @functools.wraps(wrap)
        def setup_model(*args: Any, **kwargs: Any) -> Any:
            vars(strategy).pop("_setup_model", None)
            model = wrap(*args, **kwargs)
            if isinstance(model, DistributedDataParallel):
                self.may_differ = not apply_bucket_layout(model, layout)
            return model

        strategy._setup_model = setup_model


def read_bucket_layout(model: DistributedDataParallel) -> Layout | None:
    """Of the reducer of now. Needs as much memory as the gradients take, for a moment; None where
    a GPU lacks it."""
    names = {id(p): name for name, p in model.module.named_parameters()}
    if not _room_for_gradients(model):
        return None
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[names[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _room_for_gradients(model: DistributedDataParallel) -> bool:
    parameters = [p for p in model.module.parameters() if p.requires_grad and p.is_cuda]
    if not parameters:
        return True
    device = parameters[0].device
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bool(free > 2 * sum(p.nbytes for p in parameters))


def _rebuild(model: DistributedDataParallel) -> bool:
    """What the next forward would do first."""
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True
    return bool(model._has_rebuilt_buckets)


def apply_bucket_layout(model: DistributedDataParallel, layout: Layout | None) -> bool:
    """Whether ``model``, which has done no step, now has rank 0's ``layout`` of buckets. Ranks must
    never differ in them, so each step is taken by all or by none."""
    everywhere = [layout]
    dist.broadcast_object_list(everywhere, src=0)
    layout = everywhere[0]
    if not layout:
        return layout is not None
    before = model.reducer, model.logger
    try:
        made = _order_of_arrival(model, layout)
    except Exception:  # noqa: BLE001  (another torch: training matters more than the last bits)
        made = False
    if not _all(made):
        model.reducer, model.logger = before
        return False
    del before
    model.reducer._push_all_rebuilt_params()
    _rebuild(model)
    return _all(read_bucket_layout(model) == layout)


def _order_of_arrival(model: Any, layout: Layout) -> bool:
    """Make the reducer anew with its parameters in the order of ``layout``."""
    if model.static_graph or model.mixed_precision is not None or model._use_python_reducer:
        return False  # these number their parameters elsewhere
    if model._delay_all_reduce_params or not hasattr(model.reducer, "_push_all_rebuilt_params"):
        return False
    parameters, sparse = model._build_params_for_reducer()
    names = {id(p): name for name, p in model.module.named_parameters()}
    at = {names[id(p)]: number for number, p in enumerate(parameters)}
    order = [at.get(name) for bucket in layout for name in bucket]
    if sorted(number for number in order if number is not None) != list(range(len(parameters))):
        return False
    ordered = [parameters[number] for number in order if number is not None]
    model._ddp_init_helper(
        ordered,
        [sparse[number] for number in order if number is not None],
        model._build_debug_param_to_name_mapping(ordered),
        model.static_graph,
    )
    return True


def _all(yes: bool) -> bool:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, yes)
    return all(answers)
