"""Where torch's ``DataLoader`` is in its epoch, and how another goes on from there.

The loader's iterator draws sample numbers from an index sampler. ``DataLoaderPosition`` puts itself
between the two: it notes the random states from which an epoch's order was drawn, counts what was
drawn and keeps a checksum of it. To go on, the order is drawn again from the same states and the
numbers already used are dropped; no sample is loaded for it. What samplers count by themselves in
plain attributes goes back likewise. Where the checksum of the dropped numbers differs, the sampler
gave another order and the position is not exact. For another number of ranks, or batches of another
size, what is left is dealt anew (``dealt.py``).

Only the iterator sees the substitute: the loader's own attributes stay as the user made them.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ltui.training.rank.resume.random_states import (
    preserve_random_states,
    read_random_states,
    restore_random_states,
)
from ltui.training.rank.resume.resharding import (
    describe_order,
    rest,
    sampler_sharding,
    shards_batches,
    wrapped_sampler,
)

_SLACK = 8
_COUNTED = (bool, int, float, str)


def can_track(loader: Any) -> bool:
    """A DataLoader whose samples have numbers and that keeps no position of its own."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not is_stateful_loader(loader)
    )


def is_stateful_loader(loader: Any) -> bool:
    """Lightning saves and loads the state of such a loader by itself."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


class DataLoaderPosition:
    """Follows one DataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._iterator: weakref.ref[Any] | None = None
        self._draw: _Draw | None = None
        self._go_on: dict[str, Any] | None = None
        self._rest: _Rest | None = None
        self._epoch_of_rest: dict[str, Any] | None = None
        self.exact = True
        """Whether the numbers dropped at the last ``resume`` were those used before."""
        self.dealt_anew = False
        """Whether the rest of the epoch was dealt anew, to other ranks or in other batches."""
        self._counts = _Counts(loader)
        loader._get_iterator = self._open

    def detach(self) -> None:
        if (loader := self._loader()) is not None:
            loader.__dict__.pop("_get_iterator", None)

    def _open(self) -> Any:
        loader = self._loader()
        assert loader is not None
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = loader.__dict__[name]
        loader.__dict__[name] = _Followed(sampler, self)  # past the loader's guard
        try:
            iterator = type(loader)._get_iterator(loader)
        finally:
            loader.__dict__[name] = sampler
            # Not in ``draw``: with workers, an iterator iterates its sampler twice at first.
            self._go_on = self._rest = None
        self._iterator = weakref.ref(iterator)
        return iterator

    def draw(self, sampler: Any) -> _Draw:
        """An epoch begins: ``sampler`` is about to be iterated."""
        loader = self._loader()
        generators = generators_of(loader) if loader is not None else []
        ahead = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        states = _States(generators, self._counts)
        draw = _Draw(sampler, states, ahead + _SLACK, self._go_on, loader, self._rest)
        self.exact = draw.exact
        self._draw = draw
        return draw

    def state(self, fetched_ahead: int = 0) -> dict[str, Any]:
        """Weights-only types. ``fetched_ahead``: batches that Lightning holds but has not used."""
        draw, iterator = self._draw, self._iterator() if self._iterator is not None else None
        loader = self._loader()
        if draw is None or iterator is None or loader is None:
            return {"used": 0}
        used = draw.dropped + iterator._num_yielded - fetched_ahead
        checksum, items = draw.at(used)
        return {
            "used": used,
            "sum": checksum,
            "items": None
            if items is None
            else draw.items_before + items * sampler_sharding(loader)[1],
            "share": sampler_sharding(loader)[1],
            "batch_size": loader.batch_size,
            "order": draw.order,
            "dealt_anew": draw.items_before > 0,
            "made": draw.made,
            "begun": draw.begun,
            "generators": [g.get_state() for g in draw.states.generators],
            "counts": self._counts.now(),
        }

    def resume(self, state: dict[str, Any]) -> bool:
        """Have the next epoch begin after the batches that were used; False where it begins at
        its first. The samplers' epoch must be set."""
        self.dealt_anew = False
        loader = self._loader()
        if state["used"] <= 0 or state["begun"] is None or loader is None:
            return False
        if "items" not in state or not (
            state["dealt_anew"]
            or state["share"] != sampler_sharding(loader)[1]
            or state["batch_size"] != loader.batch_size
        ):
            self._go_on = state
            return True
        self._deal_anew(loader, state)
        return self._rest is not None

    def _deal_anew(self, loader: Any, state: dict[str, Any]) -> None:
        self.exact = False
        if state["items"] is None:
            return
        generators = generators_of(loader)
        states = _States(generators, self._counts)
        with preserve_random_states():
            kept = [g.get_state() for g in generators]
            states.restore(state["made"])
            states.restore(state["begun"])
            numbers = rest(loader, state["order"], state["items"])
            _set(generators, kept)
        if numbers is not None:
            self._rest = _Rest(numbers, state)
            self.exact = self.dealt_anew = True

    def begin_anew(self) -> None:
        """Take back ``resume``: the epoch was over."""
        self._go_on = self._rest = None
        self.dealt_anew = False

    def batches_left(self) -> float:
        """Of the epoch that goes on, as ``resume`` was told; infinite where it has no length."""
        if self._rest is not None:
            return len(self._rest.numbers)
        used = self._go_on["used"] if self._go_on is not None else 0
        return _length(self._loader()) - used

    def restore_generators(self, state: dict[str, Any]) -> None:
        """Those of the loader and its samplers, and what samplers count, as they were when the
        checkpoint was saved."""
        loader = self._loader()
        if loader is not None:
            _set(generators_of(loader), state.get("generators", []))
            self._counts.restore(state.get("counts", []))


class _Rest:
    """An epoch's rest, dealt anew; ``of`` is the state from which its order was drawn."""

    def __init__(self, numbers: list[Any], of: dict[str, Any]) -> None:
        self.numbers, self.of = numbers, of


class _Followed:
    """An index sampler as the loader's iterator sees it."""

    def __init__(self, sampler: Any, position: DataLoaderPosition) -> None:
        self.followed = sampler
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return self._position.draw(self.followed)

    def __len__(self) -> int:
        return len(self.followed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.followed, name)


class _Counts:
    """What a loader's samplers keep in plain attributes and change as they are iterated, such as an
    epoch that they count by themselves. Not of samplers that Lightning tells the epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._built = [_plain_attributes(each) for each in self._counting()]

    def _counting(self) -> list[Any]:
        found = {id(each): each for each in _samplers(self._loader()) if each is not None}
        return [each for each in found.values() if not hasattr(each, "set_epoch")]

    def now(self) -> list[dict[str, Any]]:
        """Of each sampler, by name, those that are others than before the training."""
        at = [_plain_attributes(each) for each in self._counting()]
        return [
            {name: value for name, value in new.items() if name not in old or old[name] != value}
            for new, old in zip(at, self._built, strict=False)
        ]

    def restore(self, saved: list[dict[str, Any]]) -> None:
        for sampler, built, given in zip(self._counting(), self._built, saved, strict=False):
            for name in _plain_attributes(sampler).keys() - built.keys():
                del vars(sampler)[name]  # of the class until it was counted
            vars(sampler).update({**built, **given})


def _plain_attributes(sampler: Any) -> dict[str, Any]:
    values = getattr(sampler, "__dict__", {})
    return {name: value for name, value in values.items() if type(value) in _COUNTED}


class _States:
    """From which a loader's order is drawn: the rank's random states, the generators of the loader
    and its samplers, and what the samplers count."""

    def __init__(self, generators: list[torch.Generator], counts: _Counts) -> None:
        self.generators = generators
        self._counts = counts

    def now(self) -> dict[str, Any]:
        return {
            "global": read_random_states(),
            "own": [g.get_state() for g in self.generators],
            "counts": self._counts.now(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        restore_random_states(saved["global"])
        _set(self.generators, saved["own"])
        self._counts.restore(saved.get("counts", []))


class _Draw:
    """One epoch's numbers. Samplers draw their order when iterated or with the first number, so
    the states before both are kept."""

    __slots__ = (
        *("_deals_batches", "_drawn", "_numbers", "_sums"),
        *("begun", "dropped", "exact", "items_before", "made", "order", "states"),
    )

    def __init__(
        self,
        sampler: Any,
        states: _States,
        keep: int,
        saved: dict[str, Any] | None,
        loader: Any,
        rest: _Rest | None,
    ) -> None:
        self.states = states
        self.dropped = 0
        self.exact = True
        self.items_before = 0
        """Of all ranks, before the rest of an epoch was dealt anew."""
        self._deals_batches = shards_batches(loader)
        self._drawn = 0
        self._sums: deque[tuple[int, int]] = deque([(0, 0)], maxlen=keep + 1)
        """Checksum and count of items after each of the last draws."""
        self.begun: dict[str, Any] | None = None
        if rest is not None:
            self.order, self.items_before = rest.of["order"], rest.of["items"]
            self.made, self.begun = rest.of["made"], rest.of["begun"]
            self._numbers = iter(rest.numbers)
            return
        self.order = describe_order(loader)
        if saved is None:
            self.made = self.states.now()
            self._numbers = iter(sampler)
            return
        with preserve_random_states():
            self._drop(sampler, saved)

    def _drop(self, sampler: Any, saved: dict[str, Any]) -> None:
        self.made, self.begun = saved["made"], saved["begun"]
        self.states.restore(saved["made"])
        self._numbers = iter(sampler)
        self.states.restore(saved["begun"])
        for _ in range(saved["used"]):
            if next(self, None) is None:
                break
        self.dropped = self._drawn
        self.exact = self._sums[-1][0] == saved["sum"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.begun is None:
            self.begun = self.states.now()
        numbers = next(self._numbers)
        self._drawn += 1
        checksum, items = self._sums[-1]
        counted = isinstance(numbers, (list, tuple)) and not self._deals_batches
        items += len(numbers) if counted else 1
        self._sums.append((_checksum(checksum, numbers), items))
        return numbers

    def at(self, used: int) -> tuple[int | None, int | None]:
        """Checksum and count of items of the first ``used`` draws; workers draw ahead."""
        ahead = self._drawn - used
        return self._sums[-1 - ahead] if 0 <= ahead < len(self._sums) else (None, None)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The loader's own generators and its samplers', each once, always in the same order."""
    found = []
    for owner in (loader, *_samplers(loader)):
        values = getattr(owner, "__dict__", {})
        found += [values[name] for name in sorted(values)]
    generators = [value for value in found if isinstance(value, torch.Generator)]
    return list({id(generator): generator for generator in generators}.values())


def innermost_sampler(loader: Any) -> Any:
    """The one that draws the order of sample numbers."""
    sampler, batch_sampler, batched, *within = _samplers(loader)
    found = [each for each in (*within, batched, batch_sampler) if each is not None]
    return found[0] if found else sampler


def _samplers(loader: Any) -> tuple[Any, ...]:
    """The loader's, its batch sampler, that one's, and those of one's own which Lightning shares
    among ranks through a wrapper around either."""
    sampler, batch_sampler = (
        found.followed if isinstance(found, _Followed) else found
        for found in (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    )
    batched = getattr(batch_sampler, "sampler", None)
    return sampler, batch_sampler, batched, wrapped_sampler(sampler), wrapped_sampler(batched)


def shut_down(loader: Any) -> None:
    """The iterator that a DataLoader keeps: ``persistent_workers`` would go on with it, and one
    that was made before is not followed."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is None or not isinstance(loader, DataLoader):
        return
    if callable(shut := getattr(iterator, "_shutdown_workers", None)):
        shut()
    loader._iterator = None


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")


def _checksum(before: int, numbers: Any) -> int:
    try:
        return zlib.crc32(array("q", numbers), before)
    except (TypeError, OverflowError):  # not a batch of integers
        return zlib.crc32(repr(numbers).encode(), before)
