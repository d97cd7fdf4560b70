"""The loops that a program lets ltui follow, their positions, and how they resume there.

A program calls ``optimizer.step()`` somewhere in the body of its loop; what follows in the body (a
scheduler, a counter) belongs to the same step. Therefore, within a tracked loop, the boundary of a
step is where the innermost loop asks for its next item.

A checkpoint has the positions of all loops that the program is in, the outermost first. Only the
items of the innermost one are over; an item of another loop is still in progress, so a resume hands
it out again.

The DataLoader inside of the loaders that Fabric and accelerate prepare. Both give the sampler the
number of the pass by a counter of their own, which starts at 0 in each process. accelerate fetches
one batch ahead, to know which one is the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from ltui.training.rank.lightning_internals import FABRIC_PASSES, fabric_loader
from ltui.training.rank.resume.loader_positions import LoaderPositions
from ltui.training.rank.resume.plain_data import States, restore_random_states
from ltui.training.rank.torch_internals import call_after_iterator


@dataclass(frozen=True, slots=True)
class WrappedLoader:
    """What a program iterates, and the loader that reads the data."""

    outer: Any
    inner: Any
    """The loader whose position is tracked; None if that of ``outer`` cannot be known."""
    passes: str | None = None
    """Attribute of ``outer`` that counts its passes."""
    fetches_ahead: bool = False

    def set_passes(self, passes: int) -> None:
        """Set the number of passes before the one that begins."""
        if self.passes is not None:
            setattr(self.outer, self.passes, passes)

    def fetched_ahead(self, used: int) -> int:
        """Return how many batches are fetched of which the program has not had its turn."""
        return int(self.fetches_ahead and used < len(self.inner))


def unwrap_loader(loader: Any) -> WrappedLoader:
    """Return the loader inside of ``loader``, which is itself if no library has wrapped it."""
    if (inner := fabric_loader(loader)) is not None:
        return WrappedLoader(loader, inner, FABRIC_PASSES)
    if not any(base.__module__ == "accelerate.data_loader" for base in type(loader).__mro__):
        return WrappedLoader(loader, loader)
    if hasattr(loader, "dl_state_dict"):  # it wraps a StatefulDataLoader
        return WrappedLoader(loader, loader, "iteration")
    inner = getattr(loader, "base_dataloader", None)
    if type(loader).__name__ == "DataLoaderShard" and isinstance(inner, DataLoader):
        return WrappedLoader(loader, inner, "iteration", fetches_ahead=True)
    return WrappedLoader(loader, None, "iteration")


_POSITIONS = "ltui_positions"
"""Attribute of a loader with its ``_LoaderPasses``, which live as long as the loader."""


class LoopStack:
    """The tracked loops of this process. The outermost is the first of ``loops``."""

    def __init__(self) -> None:
        self.loops: list[TrackedLoop] = []
        self.library_ends_steps = False
        """True while a library's own loop calls ``end_of_body``."""
        self.end_of_body: Callable[[], None] = lambda: None
        """Called when a loop asks for its next item: then a step may be over."""
        self.inexact: Callable[[str], None] = lambda _text: None
        """Called with what a resume could not restore, as the middle of a sentence."""
        self._saved: list[dict[str, Any]] = []
        """The positions from which loops still have to continue."""
        self._depth_saved = 0
        self._states: States | None = None
        self._device: torch.device | None = None
        self.same_ranks = True

    @property
    def ends_steps(self) -> bool:
        """True if ``end_of_body`` will be called after the present step."""
        return self.library_ends_steps or bool(self.loops)

    def positions(self) -> list[dict[str, Any]]:
        """Return the positions of all loops, in weights-only types."""
        return [loop.position() for loop in self.loops]

    def resume(
        self,
        saved: list[dict[str, Any]],
        states: States,
        device: torch.device | None,
        *,
        same_ranks: bool,
    ) -> None:
        """Have the loops that begin continue from ``saved``, and then restore ``states``."""
        self._saved, self._depth_saved = list(saved), len(saved)
        self._states, self._device, self.same_ranks = states, device, same_ranks
        if not saved:
            self.restore_states()

    def restore_states(self) -> None:
        """Restore the random states, once the innermost loop continues."""
        states, self._states = self._states, None
        if states is not None:
            restore_random_states(states, self._device)

    def enter(self, loop: TrackedLoop) -> tuple[dict[str, Any] | None, bool]:
        """Add a loop that begins. Return its saved position, and if that loop was the innermost."""
        depth = len(self.loops)
        self.loops.append(loop)
        if depth != self._depth_saved - len(self._saved) or not self._saved:
            return None, False
        if self._saved[0]["name"] != loop.name:
            return None, False
        return self._saved.pop(0), not self._saved

    def leave(self, loop: TrackedLoop) -> None:
        """Remove a loop that has ended, and what was left within it."""
        if loop in self.loops:
            del self.loops[self.loops.index(loop) :]

    def item_over(self, loop: TrackedLoop) -> None:
        """Pass the end of a body. An inner loop that has not continued by now never will."""
        self.end_of_body()
        if self._saved and loop is self.loops[-1] and self._depth_saved > len(self._saved):
            self._saved.clear()
            self.inexact("a loop within the loop that continued was not tracked this time")
            self.restore_states()


stack = LoopStack()
"""The loops of this process."""


class TrackedLoop:
    """An iterable of the program whose position is known."""

    def __init__(self, items: Iterable[Any], name: str) -> None:
        self.name = name
        self._items = items
        self._used = 0
        self._passes: _LoaderPasses | None = None

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as ``dataset`` or ``sampler``."""
        if name == "_items":  # a copy of this object has no attributes at first
            raise AttributeError(name)
        return getattr(self._items, name)

    def __iter__(self) -> Iterator[Any]:
        saved, innermost = stack.enter(self)
        try:
            for item in self._begin(saved, innermost=innermost):
                self._used += 1
                yield item
                stack.item_over(self)
        finally:
            stack.leave(self)

    def position(self) -> dict[str, Any]:
        """Return the position in weights-only types."""
        passes = self._passes
        loader = None if passes is None else passes.state(self._used)
        return {"name": self.name, "used": self._used, "loader": loader}

    def _begin(self, saved: dict[str, Any] | None, *, innermost: bool) -> Iterator[Any]:
        self._used, items = 0, self._items
        if saved is not None:
            # The body of the last item of an outer loop is still in progress.
            self._used = saved["used"] if innermost else max(0, saved["used"] - 1)
        position = saved["loader"] if saved is not None and innermost else None
        if isinstance(items, Sequence):
            iterator: Iterator[Any] = itertools.islice(iter(items), self._used, None)
        else:
            self._passes = _passes_of(items)
            iterator = self._passes.begin(position, self._used)
            if position is None and self._used:
                iterator = itertools.islice(iterator, self._used, None)
                stack.inexact("a loader around another loop was read again from its beginning")
        if innermost and position is None:
            stack.restore_states()
        return iterator


class _LoaderPasses:
    """The position of one loader in its present pass, and the number of passes before."""

    def __init__(self, loader: Any) -> None:
        self._loader = unwrap_loader(loader)
        self._finished = -1
        self._positions = LoaderPositions(lambda: self._finished)
        inner = self._loader.inner
        self._positions.track([] if inner is None else [inner])

    def begin(self, saved: dict[str, Any] | None, used: int) -> Iterator[Any]:
        """Return the iterator of the pass that begins, after ``used`` items of ``saved``.

        The random states are restored when the loader's iterator exists, which draws from them.
        """
        loader, positions = self._loader, self._positions
        self._finished += 1
        if saved is None:
            positions.epoch_begins()
            return iter(loader.outer)
        self._finished = saved["passes"]
        loader.set_passes(self._finished)
        if loader.inner is None:
            stack.inexact("a loader of accelerate was read again, from its first batch")
            self._restore(saved)
            return itertools.islice(iter(loader.outer), used, None)
        positions.resume(saved, used, same_ranks=stack.same_ranks, over=False)
        positions.epoch_begins()
        if loader.inner is not loader.outer:
            # The iterator is created when the first item is asked for.
            call_after_iterator(loader.inner, lambda: self._restore(saved))
            return iter(loader.outer)
        iterator = _CountingIterator(iter(loader.outer))
        positions.after_iterators_created(iterator, saved)
        self._restore(saved)
        return iterator.items

    def _restore(self, saved: dict[str, Any]) -> None:
        """Restore the random states and the loader's generators, and report what differs."""
        positions = self._positions
        stack.restore_states()
        positions.restore_generators(saved)
        positions.check_dropped_indices()
        for text in positions.inexact:
            stack.inexact(text)
        positions.inexact.clear()

    def state(self, used: int) -> dict[str, Any]:
        """Return the position after ``used`` items, in weights-only types."""
        ahead = 0 if self._loader.inner is None else self._loader.fetched_ahead(used)
        fetcher = _CountingIterator(iter(()), [None] * ahead)
        return {**self._positions.states(fetcher), "passes": self._finished}


class _CountingIterator:
    """What ``LoaderPositions`` needs to read used items of a loader without a position again."""

    def __init__(self, items: Iterator[Any], batches: Sequence[Any] = ()) -> None:
        self.items = items
        self.batches = batches
        """What is fetched ahead."""
        self.fetched = 0

    def __next__(self) -> Any:
        return next(self.items)


def _passes_of(loader: Any) -> _LoaderPasses:
    attributes = getattr(loader, "__dict__", None)
    if attributes is None:  # a generator, of which there is one pass
        return _LoaderPasses(loader)
    passes = attributes.get(_POSITIONS)
    if not isinstance(passes, _LoaderPasses):
        passes = attributes[_POSITIONS] = _LoaderPasses(loader)
    return passes
