"""The samplers of a DataLoader, and the generators from which the loader and its samplers draw.

Resharding: distribute the remaining samples of an epoch over another number of ranks or batches.
Distributed samplers draw one order of all samples and give sample i to rank i modulo the number of
ranks. Therefore the samples that all ranks together have used are the beginning of that order. This
module draws the same order again, with torch's own samplers or with any sampler that Lightning
wraps, and distributes the rest of it over the present ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ltui.training.rank.lightning_internals import wrapped_sampler


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """Return all samplers of the loader; each may be None.

    They are its sampler, its batch sampler, the batch sampler's sampler, and the samplers inside
    the wrappers with which Lightning distributes the first and the third over the ranks. While
    ``DataLoaderPosition`` replaces one of them, the original is returned.
    """
    sampler, batch_sampler = (
        getattr(each, "ltui_original", each)
        for each in (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    )
    # accelerate shards the batches of another batch sampler.
    batches = getattr(batch_sampler, "batch_sampler", batch_sampler)
    batched_sampler = getattr(batches, "sampler", None)
    wrapped = wrapped_sampler(sampler), wrapped_sampler(batched_sampler)
    return sampler, batch_sampler, batched_sampler, *wrapped


def innermost_sampler(loader: Any) -> Any:
    """Return the sampler that draws the order of the samples."""
    sampler, batch_sampler, batched_sampler, *wrapped = samplers_of(loader)
    candidates = [s for s in (*wrapped, batched_sampler, batch_sampler) if s is not None]
    return candidates[0] if candidates else sampler


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of the loader and its samplers, each once, in a fixed order."""
    values = []
    for owner in (loader, *samplers_of(loader)):
        attributes = getattr(owner, "__dict__", {})
        values += [attributes[name] for name in sorted(attributes)]
    generators = [value for value in values if isinstance(value, torch.Generator)]
    return list({id(generator): generator for generator in generators}.values())


def read_generators(loader: Any) -> list[torch.Tensor]:
    """Return the states of the generators of the loader and its samplers."""
    return [generator.get_state() for generator in _generators_of(loader)]


def restore_generators(loader: Any, states: list[torch.Tensor]) -> None:
    """Set the generators of the loader and its samplers to a value of ``read_generators``."""
    for generator, state in zip(_generators_of(loader), states, strict=False):
        generator.set_state(state)


_TORCH_SAMPLERS = ("RandomSampler", "SequentialSampler", "DistributedSampler")
"""Samplers whose order this module draws by torch's own rule."""


def sampler_sharding(loader: Any) -> tuple[int, int]:
    """Return the rank and the number of ranks between which the loader's samplers share an epoch.

    Return ``(0, 1)`` if they do not share it.
    """
    for sampler in (samplers_of(loader)[1], loader.sampler):
        for attribute in ("num_replicas", "world_size"):
            if isinstance(getattr(sampler, attribute, None), int):
                return int(sampler.rank), int(getattr(sampler, attribute))
    return 0, 1


def describe_order(loader: Any) -> dict[str, Any]:
    """Return plain values that say how the epoch's order is drawn. Call it when the order is drawn.

    ``remaining_indices`` draws the same order from them again.
    """
    sampler = loader.sampler
    order: dict[str, Any] = {"sampler": type(_innermost(sampler)).__name__}
    if type(sampler) is DistributedSampler:
        # The order depends on these three values alone, with any number of ranks.
        order.update(shuffle=sampler.shuffle, seed=sampler.seed, epoch=sampler.epoch)
    elif isinstance(sampler, RandomSampler):
        permutes = not sampler.replacement and len(sampler) == len(loader.dataset)
        order["sampler"] = "RandomSampler" if permutes else "with replacement"
    return order


def shards_batches(loader: Any) -> bool:
    """Return True if the batch sampler distributes complete batches over the ranks.

    Each draw from it then counts as one item of the epoch's order. Otherwise each sample of a batch
    counts.
    """
    return callable(getattr(samplers_of(loader)[1], "deal_rest", None))


def remaining_indices(loader: Any, order: dict[str, Any], used: int) -> list[Any] | None:
    """Return what this rank's index sampler would yield for the rest of an epoch.

    ``order`` is the value of ``describe_order`` for that epoch, and ``used`` is the number of items
    that all ranks together have used. The random states must be those from which the order was
    drawn. Return None if the order can't be drawn again.
    """
    batch_sampler, (rank, ranks) = samplers_of(loader)[1], sampler_sharding(loader)
    if callable(deal_rest := getattr(batch_sampler, "deal_rest", None)):
        return list(deal_rest(used))
    if callable(deal_rest := getattr(loader.sampler, "deal_rest", None)):
        indices = list(deal_rest(used))
    else:
        complete_order = _draw_order(loader, order)
        if complete_order is None:
            return None
        drop_last = getattr(loader.sampler, "drop_last", False)
        indices = _indices_of_rank(complete_order, used, rank, ranks, drop_last)
    if batch_sampler is None:
        return indices
    if type(batch_sampler).__name__ != BatchSampler.__name__:
        return None
    size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    batches = [indices[i : i + size] for i in range(0, len(indices), size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches


def _indices_of_rank(
    complete_order: list[int], used: int, rank: int, ranks: int, drop_last: bool
) -> list[int]:
    """Return this rank's part of the order after its first ``used`` items."""
    remaining = complete_order[used:]
    if drop_last:
        return remaining[: len(remaining) - len(remaining) % ranks][rank::ranks]
    padding = -len(remaining) % ranks
    # ``DistributedSampler`` also pads with the first samples of the order.
    while padding > 0:
        remaining += complete_order[:padding]
        padding = -len(remaining) % ranks
    return remaining[rank::ranks]


def _draw_order(loader: Any, order: dict[str, Any]) -> list[int] | None:
    """Draw the epoch's order of all ranks again. Return None for an unsupported sampler."""
    samples, name = len(loader.dataset), order["sampler"]
    if name == "DistributedSampler" and "seed" in order:
        if not order["shuffle"]:
            return list(range(samples))
        generator = torch.Generator().manual_seed(order["seed"] + order["epoch"])
        indices: list[int] = torch.randperm(samples, generator=generator).tolist()
        return indices
    sampler = _innermost(loader.sampler)
    if name == type(sampler).__name__ and name not in _TORCH_SAMPLERS:
        return list(sampler)
    if name == "RandomSampler":
        return list(RandomSampler(range(samples), generator=loader.generator))
    if name == "SequentialSampler":
        return list(SequentialSampler(range(samples)))
    return None


def _innermost(sampler: Any) -> Any:
    """Return the sampler inside Lightning's wrapper, or ``sampler`` if it has no wrapper."""
    inner = wrapped_sampler(sampler)
    return sampler if inner is None else inner
