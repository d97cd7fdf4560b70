"""Stateful loaders, which implement ``state_dict()``, and loaders without any position.

Lightning saves rank 0's state of a stateful loader and loads it on every rank. Here every rank
saves and loads its own. Loading needs a few more steps:

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
from torch.utils.data import DataLoader

from ltui.training.rank.resume.plain_data import (
    States,
    is_equal,
    is_plain_data,
    preserve_random_states,
    read_random_states,
    restore_random_states,
)
from ltui.training.rank.resume.samplers_and_generators import (
    innermost_sampler,
    read_generators,
    restore_generators,
)
from ltui.training.rank.torch_internals import (
    create_iterator,
    replace_get_iterator,
    restore_get_iterator,
)

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
