"""Loaders that keep their own position (``state_dict``, ``load_state_dict``), and those that have
none.

Lightning saves rank 0's state of a loader and loads it on every rank; here every rank keeps its
own. Where it loads one, a few things more are needed:

- torchdata's ``StatefulDataLoader`` draws its order again from generators and random states, which
  must be what they were when it was drawn first;
- at the end of an epoch its iterator must be run to its end, or the next epoch is skipped;
- where the loader has no length, Lightning fetches a batch ahead, which the loader's state counts
  as used, so that batch is kept too.

A loader without a position is read again from the epoch's beginning, with the random states of
then.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ltui.training.rank.resume.dataloader_position import generators_of, innermost_sampler
from ltui.training.rank.resume.random_states import (
    States,
    preserve_random_states,
    read_random_states,
    restore_random_states,
)

_Made = tuple[States, list[torch.Tensor]]
_PLAIN = (str, int, float, bool, bytes, type(None), torch.Tensor)


class StatefulLoaderPosition:
    """Of a loader that keeps its own."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._made: _Made | None = None
        """The states from which this epoch's order was drawn."""
        self._go_on: _Made | None = None
        self._again: _Made | None = None
        """The same of an epoch that goes on, while its iterator is made."""
        self._sampler: Any = None
        if isinstance(loader, DataLoader):
            loader._get_iterator = self._open  # type: ignore[method-assign]
            self._sampler = _told_of_draws(innermost_sampler(loader), self._before_each_draw)

    def detach(self) -> None:
        if (loader := self._loader()) is not None:
            loader.__dict__.pop("_get_iterator", None)
        if self._sampler is not None:
            self._sampler.__class__ = type(self._sampler).__base__
            self._sampler = None

    def _open(self) -> Any:
        loader: Any = self._loader()
        resume, self._go_on = self._go_on, None
        if resume is None:
            self._note()
            return type(loader)._get_iterator(loader)
        self._made = self._again = resume
        try:
            with preserve_random_states():
                self._before_each_draw()
                return type(loader)._get_iterator(loader)
        finally:
            self._again = None

    def _before_each_draw(self) -> None:
        """Of the sampler's order. torchdata draws it twice where there are workers or a state is
        loaded, and the last counts."""
        if self._again is None:
            self._note()
            return
        restore_random_states(self._again[0])
        for generator, state in zip(generators_of(self._loader()), self._again[1], strict=False):
            generator.set_state(state)

    def _note(self) -> None:
        self._made = read_random_states(), [g.get_state() for g in generators_of(self._loader())]

    def state(self) -> dict[str, Any]:
        """Weights-only types; ``state`` is None where the loader's own is more."""
        loader: Any = self._loader()
        own = loader.state_dict()
        made = self._made
        return {
            "state": own if is_plain_data(own) else None,
            "made": None if made is None else [made[0], made[1]],
            "generators": [g.get_state() for g in generators_of(loader)],
        }

    def resume(self, state: dict[str, Any]) -> None:
        loader: Any = self._loader()
        if state["state"] is not None:
            loader.load_state_dict(state["state"])
        if state["made"] is not None:
            self._go_on = state["made"][0], state["made"][1]

    def batches_left(self) -> int | None:
        """As the loader says after its state was loaded; None where it does not."""
        left = getattr(self._loader(), "batches_left", None)
        return int(left()) if callable(left) else None

    def restore_generators(self, state: dict[str, Any]) -> None:
        saved = state.get("generators", [])
        for generator, own in zip(generators_of(self._loader()), saved, strict=False):
            generator.set_state(own)


def _told_of_draws(sampler: Any, tell: Callable[[], None]) -> Any:
    """Have ``sampler`` call ``tell`` just before it draws an order; None where it can't."""
    plain = type(sampler)

    def draw(self: Any) -> Any:
        tell()
        numbers = plain.__iter__(self)
        return lazily(numbers) if inspect.isgenerator(numbers) else numbers

    def lazily(numbers: Iterator[Any]) -> Iterator[Any]:
        tell()  # a generator's body runs with the first number
        yield from numbers

    try:
        sampler.__class__ = type(plain.__name__, (plain,), {"__iter__": draw})
    except TypeError:  # a list, say
        return None
    return sampler


def exhaust_iterator(iterator: Any) -> None:
    """Of an epoch all of whose batches were used: a position that is told only by the attempt to
    read on."""
    with preserve_random_states():
        next(iterator, None)


class BatchReplay:
    """Batches of an epoch that were used are read again and dropped."""

    def __init__(self, fetcher: Any, batches: int) -> None:
        self._fetcher, self._batches = fetcher, batches

    def run(self) -> str | None:
        """What may not be exact afterwards, as the middle of a sentence."""
        fetcher, before = self._fetcher, read_random_states()
        dropped = 0
        while dropped < self._batches:
            try:
                next(fetcher)
            except StopIteration:
                return "the loader ended before the batches that were used, so this epoch ends here"
            dropped += 1
        # Lightning counts the batches of before by itself.
        fetcher.fetched -= dropped
        if not alike(before, read_random_states()):
            return (
                "the loader draws at random in the rank's own process while it is read, so it may "
                "go on with other samples"
            )
        return None


def is_plain_data(value: Any) -> bool:
    """Whether it can be loaded without unpickling objects."""
    if isinstance(value, dict):
        return all(is_plain_data(k) and is_plain_data(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain_data, value))
    return type(value) in _PLAIN or type(value) is torch.nn.Parameter


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
