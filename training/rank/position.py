"""Where torch's ``DataLoader`` is in its epoch, and how another goes on from there.

The loader's iterator draws sample numbers from an index sampler. ``LoaderPosition`` puts itself
between the two: it notes the random states from which an epoch's order was drawn, counts what was
drawn and keeps a checksum of it. To go on, the order is drawn again from the same states and the
numbers already used are dropped; no sample is loaded for it. Where the checksum of the dropped
numbers differs, the sampler gave another order and the position is not exact.

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

from ltui.training.rank.randomness import as_before, random_states, restore_random_states

_SLACK = 8


def can_follow(loader: Any) -> bool:
    """A DataLoader whose samples have numbers and that keeps no position of its own."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not keeps_position(loader)
    )


def keeps_position(loader: Any) -> bool:
    """Lightning saves and loads the state of such a loader by itself."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


class LoaderPosition:
    """Follows one DataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._iterator: weakref.ref[Any] | None = None
        self._draw: _Draw | None = None
        self._go_on: dict[str, Any] | None = None
        self.exact = True
        """Whether the numbers dropped at the last ``go_on`` were those used before."""
        loader._get_iterator = self._open

    def let_go(self) -> None:
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
            self._go_on = None
        self._iterator = weakref.ref(iterator)
        return iterator

    def draw(self, sampler: Any) -> _Draw:
        """An epoch begins: ``sampler`` is about to be iterated."""
        loader = self._loader()
        generators = generators_of(loader) if loader is not None else []
        ahead = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        draw = _Draw(sampler, generators, ahead + _SLACK, self._go_on)
        self.exact = draw.exact
        self._draw = draw
        return draw

    def state(self, fetched_ahead: int = 0) -> dict[str, Any]:
        """Weights-only types. ``fetched_ahead``: batches that Lightning holds but has not used."""
        draw, iterator = self._draw, self._iterator() if self._iterator is not None else None
        if draw is None or iterator is None:
            return {"used": 0}
        used = draw.dropped + iterator._num_yielded - fetched_ahead
        return {
            "used": used,
            "sum": draw.sum_at(used),
            "made": draw.made,
            "begun": draw.begun,
            "generators": [g.get_state() for g in draw.generators],
        }

    def go_on(self, state: dict[str, Any]) -> bool:
        """Have the next epoch begin after the batches that were used; False where it begins at
        its first."""
        if state["used"] > 0 and state["begun"] is not None:
            self._go_on = state
        return self._go_on is not None

    def ended(self, state: dict[str, Any]) -> bool:
        """Whether the batches used were all of them."""
        return bool(state.get("used", 0) >= _length(self._loader()))

    def restore_generators(self, state: dict[str, Any]) -> None:
        """Those of the loader and its samplers, as they were when the checkpoint was saved."""
        loader = self._loader()
        if loader is not None:
            _set(generators_of(loader), state.get("generators", []))


class _Followed:
    """An index sampler as the loader's iterator sees it."""

    def __init__(self, sampler: Any, position: LoaderPosition) -> None:
        self._sampler = sampler
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return self._position.draw(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Draw:
    """One epoch's numbers. Samplers draw their order when iterated or with the first number, so
    the states before both are kept."""

    def __init__(
        self,
        sampler: Any,
        generators: list[torch.Generator],
        keep: int,
        saved: dict[str, Any] | None,
    ) -> None:
        self.generators = generators
        self.dropped = 0
        self.exact = True
        self._drawn = 0
        self._sums: deque[int] = deque([0], maxlen=keep + 1)
        if saved is None:
            self.made = self._states()
            self.begun: dict[str, Any] | None = None
            self._numbers = iter(sampler)
        else:
            with as_before():
                self._drop(sampler, saved)

    def _drop(self, sampler: Any, saved: dict[str, Any]) -> None:
        self.made, self.begun = saved["made"], saved["begun"]
        self._restore(self.made)
        self._numbers = iter(sampler)
        self._restore(saved["begun"])
        for _ in range(saved["used"]):
            if next(self, None) is None:
                break
        self.dropped = self._drawn
        self.exact = self._sums[-1] == saved["sum"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.begun is None:
            self.begun = self._states()
        numbers = next(self._numbers)
        self._drawn += 1
        self._sums.append(_checksum(self._sums[-1], numbers))
        return numbers

    def sum_at(self, used: int) -> int | None:
        """Checksum of the first ``used`` draws; workers draw ahead."""
        ahead = self._drawn - used
        return self._sums[-1 - ahead] if 0 <= ahead < len(self._sums) else None

    def _states(self) -> dict[str, Any]:
        return {"global": random_states(), "own": [g.get_state() for g in self.generators]}

    def _restore(self, states: dict[str, Any]) -> None:
        restore_random_states(states["global"])
        _set(self.generators, states["own"])


def generators_of(loader: Any) -> list[torch.Generator]:
    """The loader's own generators and its samplers', each once, always in the same order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if isinstance(batch_sampler, _Followed):
        batch_sampler = batch_sampler._sampler
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, _Followed):
        sampler = sampler._sampler
    found = []
    for owner in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        values = getattr(owner, "__dict__", {})
        found += [values[name] for name in sorted(values)]
    generators = [value for value in found if isinstance(value, torch.Generator)]
    return list({id(generator): generator for generator in generators}.values())


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
