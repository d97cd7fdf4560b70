"""What is left of an epoch, dealt anew to another number of ranks or in batches of another size.

Samplers that share an epoch among ranks deal one order of all samples like cards, so what all ranks
together have used is its beginning. Here that order is drawn again, whichever sampler drew it
(torch's own, or any other that Lightning wraps), and its rest is dealt to the ranks of now.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

_AS_TORCH_DRAWS = ("RandomSampler", "SequentialSampler", "DistributedSampler")


def sampler_sharding(loader: Any) -> tuple[int, int]:
    """(rank, ranks) among which the loader's samplers share an epoch; (0, 1) where they don't."""
    for sampler in (_batch_sampler(loader), loader.sampler):
        for ranks in ("num_replicas", "world_size"):
            if isinstance(getattr(sampler, ranks, None), int):
                return int(sampler.rank), int(getattr(sampler, ranks))
    return 0, 1


def describe_order(loader: Any) -> dict[str, Any]:
    """How the epoch's order is drawn, in plain values; read while it is drawn."""
    sampler = loader.sampler
    order: dict[str, Any] = {"sampler": type(_within(sampler)).__name__}
    if type(sampler) is DistributedSampler:
        # Only whether it shuffles, its seed and the epoch matter, on any number of ranks.
        order.update(shuffle=sampler.shuffle, seed=sampler.seed, epoch=sampler.epoch)
    elif isinstance(sampler, RandomSampler):
        whole = not sampler.replacement and len(sampler) == len(loader.dataset)
        order["sampler"] = "RandomSampler" if whole else "with replacement"
    return order


def shards_batches(loader: Any) -> bool:
    """Whether what the index sampler draws counts as one item of the dealt order, as the batches
    of a batch sampler that deals batches do. Otherwise each sample of a batch counts."""
    return callable(getattr(_batch_sampler(loader), "deal_rest", None))


def rest(loader: Any, order: dict[str, Any], used: int) -> list[Any] | None:
    """What the loader's index sampler would yield on this rank for an epoch of ``order`` without
    the first ``used`` items of all ranks. None where the order can't be had again.

    The random states must be those from which the order was drawn.
    """
    batch_sampler, (rank, ranks) = _batch_sampler(loader), sampler_sharding(loader)
    if callable(deal_rest := getattr(batch_sampler, "deal_rest", None)):
        return list(deal_rest(used))
    if callable(deal_rest := getattr(loader.sampler, "deal_rest", None)):
        numbers = list(deal_rest(used))
    else:
        whole = _whole(loader, order)
        if whole is None:
            return None
        numbers = _deal(whole, used, rank, ranks, getattr(loader.sampler, "drop_last", False))
    if batch_sampler is None:
        return numbers
    if type(batch_sampler).__name__ != BatchSampler.__name__:
        return None
    size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches


def _deal(whole: list[int], used: int, rank: int, ranks: int, drop_last: bool) -> list[int]:
    left = whole[used:]
    if drop_last:
        return left[: len(left) - len(left) % ranks][rank::ranks]
    lacking = -len(left) % ranks
    # Ranks are filled up with the order's first samples, as ``DistributedSampler`` does.
    while lacking > 0:
        left += whole[:lacking]
        lacking = -len(left) % ranks
    return left[rank::ranks]


def _whole(loader: Any, order: dict[str, Any]) -> list[int] | None:
    """The order that was dealt, or read by one rank alone."""
    samples, name = len(loader.dataset), order["sampler"]
    if name == "DistributedSampler" and "seed" in order:
        if not order["shuffle"]:
            return list(range(samples))
        drawn = torch.Generator().manual_seed(order["seed"] + order["epoch"])
        numbers: list[int] = torch.randperm(samples, generator=drawn).tolist()
        return numbers
    within = _within(loader.sampler)
    if name == type(within).__name__ and name not in _AS_TORCH_DRAWS:
        return list(within)
    if name == "RandomSampler":
        return list(RandomSampler(range(samples), generator=loader.generator))
    if name == "SequentialSampler":
        return list(SequentialSampler(range(samples)))
    return None


def wrapped_sampler(sampler: Any) -> Any:
    """The user's own sampler, where Lightning wrapped it to share it among ranks, else None."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def _within(sampler: Any) -> Any:
    within = wrapped_sampler(sampler)
    return sampler if within is None else within


def _batch_sampler(loader: Any) -> Any:
    """The loader's, not the substitute through which its iterator is followed."""
    batch_sampler = loader.__dict__.get("batch_sampler", loader.batch_sampler)
    return getattr(batch_sampler, "followed", batch_sampler)
