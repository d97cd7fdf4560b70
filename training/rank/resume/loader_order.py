"""The order of a loader in an epoch: what draws it, and how it is drawn again.

An order is drawn by samplers, from generators and random states. Distributed samplers draw one
order of all samples and give sample i to rank i modulo the number of ranks. Therefore the samples
that all ranks together have used are the beginning of that order. Resharding draws the same order
again, with torch's own samplers or with any sampler that Lightning wraps, and distributes the rest
of it over another number of ranks or batches.

Lightning saves rank 0's state of a stateful loader, which implements ``state_dict()``, and loads it
on every rank. Here every rank saves and loads its own. Loading needs a few more steps:

- torchdata's ``StatefulDataLoader`` draws its order again from generators and random states. These
  must have the values that they had when the order was drawn for the first time.
- At the end of an epoch its iterator must be exhausted. Otherwise the next epoch is skipped.
- If the loader has no length, Lightning fetches one batch ahead. The loader's state counts that
  batch as used, so the checkpoint contains the batch.

A loader without a position is read again from the beginning of the epoch, with the random states
of that time, and the used batches are dropped.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ltui.training.rank.lightning_internals import wrapped_sampler
from ltui.training.rank.resume.plain_data import (
    States,
    is_equal,
    is_plain_data,
    preserve_random_states,
    read_random_states,
    restore_random_states,
)
from ltui.training.rank.torch_internals import (
    create_iterator,
    replace_get_iterator,
    restore_get_iterator,
)


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


_DrawState = tuple[States, list[torch.Tensor]]
"""Random states and generator states from which an order is drawn."""


class StatefulLoaderPosition:
    """Position of a loader that implements ``state_dict()`` itself, such as StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._drawn_from: _DrawState | None = None
        """The states from which the order of the current epoch was drawn."""
        self._restored: _DrawState | None = None
        """The states of the checkpoint, from ``resume`` until the next iterator is created."""
        self._redraw_from: _DrawState | None = None
        """The restored states, only while the resumed epoch's iterator is being created."""
        self._sampler: Any = None
        if isinstance(loader, DataLoader):
            replace_get_iterator(loader, self._create_iterator)
            self._sampler = _wrap_sampler_iter(innermost_sampler(loader), self._before_draw)

    def detach(self) -> None:
        """Give the loader and its sampler back their own methods."""
        if (loader := self._loader()) is not None:
            restore_get_iterator(loader)
        if self._sampler is not None:
            self._sampler.__class__ = type(self._sampler).__base__
            self._sampler = None

    def _create_iterator(self) -> Any:
        loader: Any = self._loader()
        restored, self._restored = self._restored, None
        if restored is None:
            self._record_draw_state()
            return create_iterator(loader)
        self._drawn_from = self._redraw_from = restored
        try:
            with preserve_random_states():
                self._before_draw()
                return create_iterator(loader)
        finally:
            self._redraw_from = None

    def _before_draw(self) -> None:
        """Record the states from which the sampler draws, or restore those of the checkpoint.

        torchdata draws the order twice if there are workers or if a state is loaded. The last draw
        counts.
        """
        if self._redraw_from is None:
            self._record_draw_state()
            return
        random_states, generator_states = self._redraw_from
        restore_random_states(random_states)
        restore_generators(self._loader(), generator_states)

    def _record_draw_state(self) -> None:
        self._drawn_from = read_random_states(), read_generators(self._loader())

    def state(self) -> dict[str, Any]:
        """Return the position in weights-only types.

        Its entry ``state`` is None if the loader's own state contains other objects.
        """
        loader: Any = self._loader()
        loader_state = loader.state_dict()
        drawn_from = self._drawn_from
        return {
            "state": loader_state if is_plain_data(loader_state) else None,
            "made": None if drawn_from is None else [drawn_from[0], drawn_from[1]],
            "generators": read_generators(loader),
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Load a value of ``state`` into the loader, before it is iterated."""
        loader: Any = self._loader()
        if state["state"] is not None:
            loader.load_state_dict(state["state"])
        if state["made"] is not None:
            self._restored = state["made"][0], state["made"][1]

    def batches_left(self) -> int | None:
        """Return the number of batches left after ``resume``; None if it is unknown."""
        batches_left = getattr(self._loader(), "batches_left", None)
        return int(batches_left()) if callable(batches_left) else None

    def restore_generators(self, state: dict[str, Any]) -> None:
        """Set the generators of the loader and its samplers to the checkpoint's states."""
        restore_generators(self._loader(), state.get("generators", []))


def _wrap_sampler_iter(sampler: Any, before_draw: Callable[[], None]) -> Any:
    """Make ``sampler`` call ``before_draw`` just before it draws an order.

    Changes the object's class and returns the object. Returns None if its class can't be changed.
    """
    original_class = type(sampler)

    def draw(self: Any) -> Any:
        before_draw()
        indices = original_class.__iter__(self)
        return draw_lazily(indices) if inspect.isgenerator(indices) else indices

    def draw_lazily(indices: Iterator[Any]) -> Iterator[Any]:
        before_draw()  # the body of a generator runs when the first index is read
        yield from indices

    try:
        sampler.__class__ = type(original_class.__name__, (original_class,), {"__iter__": draw})
    except TypeError:  # for example a list
        return None
    return sampler


def drop_used_batches(fetcher: Any, batches: int) -> str | None:
    """Read the used batches of an epoch again and drop them.

    Return what may not be exact, as the middle of a sentence, or None.
    """
    states_before = read_random_states()
    for _ in range(batches):
        try:
            next(fetcher)
        except StopIteration:
            return "the loader ended before the batches that were used, so this epoch ends here"
    # Lightning counts the batches before the checkpoint by itself.
    fetcher.fetched -= batches
    if not is_equal(states_before, read_random_states()):
        return (
            "the loader draws at random in the rank's own process while it is read, so it may "
            "continue with other samples"
        )
    return None
