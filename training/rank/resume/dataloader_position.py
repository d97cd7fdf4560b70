"""The position of torch's ``DataLoader`` in its epoch, and how a new loader resumes there.

The loader's iterator draws indices from an index sampler (the sampler or the batch sampler).
``DataLoaderPosition`` puts itself between the two. It records the random states from which the
epoch's order was drawn, counts the draws, and keeps a checksum of the indices. To resume, it draws
the order again from the same states and drops the indices that were used. No sample is loaded for
that. Counters that samplers keep in plain attributes are restored too.

If the checksum of the dropped indices differs, the sampler drew another order and the position is
not exact. For another number of ranks or another batch size, the remaining samples are resharded
(``loader_order.py``).

Only the iterator sees the substitute. The loader's own attributes stay as the user set them.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from ltui.training.rank.resume.loader_order import (
    describe_order,
    read_generators,
    remaining_indices,
    restore_generators,
    sampler_sharding,
    samplers_of,
    shards_batches,
)
from ltui.training.rank.resume.plain_data import (
    preserve_random_states,
    read_random_states,
    restore_random_states,
)
from ltui.training.rank.torch_internals import (
    create_iterator,
    discard_iterator,
    persistent_iterator,
    replace_get_iterator,
    restore_get_iterator,
    yielded_batches,
)

_EXTRA_CHECKSUMS = 8
"""Checksums kept in addition to one for each draw that workers may be ahead."""
_COUNTER_TYPES = (bool, int, float, str)
"""Types of the sampler attributes that are saved and restored."""


class DataLoaderPosition:
    """Tracks the position of one DataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._iterator: weakref.ref[Any] | None = None
        self._pass: _SamplerPass | None = None
        self._resume_state: dict[str, Any] | None = None
        """The saved position at which the next iterator begins."""
        self._remaining: _RemainingIndices | None = None
        """The resharded indices that the next iterator yields."""
        self.exact = True
        """True if the indices dropped on resume were those that had been used."""
        self._draw_states = _DrawStates(loader)
        replace_get_iterator(loader, self._create_iterator)

    def detach(self) -> None:
        """Give the loader its own method back."""
        if (loader := self._loader()) is not None:
            restore_get_iterator(loader)

    def _create_iterator(self) -> Any:
        loader = self._loader()
        assert loader is not None
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = loader.__dict__[attribute]
        # DataLoader's ``__setattr__`` refuses to replace a sampler.
        loader.__dict__[attribute] = _TrackedSampler(sampler, self)
        try:
            iterator = create_iterator(loader)
        finally:
            loader.__dict__[attribute] = sampler
            # Not in ``begin_pass``: with workers, an iterator first iterates its sampler twice.
            self._resume_state = self._remaining = None
        self._iterator = weakref.ref(iterator)
        return iterator

    def begin_pass(self, sampler: Any) -> _SamplerPass:
        """Return the iterator over ``sampler`` for the epoch that begins."""
        loader = self._loader()
        prefetch_factor = getattr(loader, "prefetch_factor", 0) or 0
        draws_ahead = getattr(loader, "num_workers", 0) * prefetch_factor
        self._pass = _SamplerPass(
            sampler,
            self._draw_states,
            draws_ahead + _EXTRA_CHECKSUMS,
            self._resume_state,
            loader,
            self._remaining,
        )
        self.exact = self._pass.exact
        return self._pass

    def state(self, fetched_ahead: int = 0) -> dict[str, Any]:
        """Return the position in weights-only types.

        ``fetched_ahead`` is the number of batches that Lightning has fetched but not used.
        """
        sampler_pass = self._pass
        iterator = self._iterator() if self._iterator is not None else None
        loader = self._loader()
        if sampler_pass is None or iterator is None or loader is None:
            return {"used": 0}
        used = sampler_pass.dropped + yielded_batches(iterator) - fetched_ahead
        checksum, items = sampler_pass.checksum_and_items(used)
        ranks = sampler_sharding(loader)[1]
        return {
            "used": used,
            "sum": checksum,
            "items": None if items is None else sampler_pass.items_before + items * ranks,
            "share": ranks,
            "batch_size": loader.batch_size,
            "order": sampler_pass.order,
            "dealt_anew": sampler_pass.items_before > 0,
            "made": sampler_pass.states_when_created,
            "begun": sampler_pass.states_at_first_draw,
            "generators": read_generators(loader),
            "counts": self._draw_states.counter_changes(),
        }

    def resume(self, state: dict[str, Any]) -> bool:
        """Make the next epoch begin after the used batches. Set the samplers' epoch before.

        Return False if the epoch begins with its first batch.
        """
        loader = self._loader()
        if state["used"] <= 0 or state["begun"] is None or loader is None:
            return False
        if "items" not in state or not (
            state["dealt_anew"]
            or state["share"] != sampler_sharding(loader)[1]
            or state["batch_size"] != loader.batch_size
        ):
            self._resume_state = state
            return True
        self._reshard(loader, state)
        return self._remaining is not None

    def _reshard(self, loader: Any, state: dict[str, Any]) -> None:
        self.exact = False
        if state["items"] is None:
            return
        with preserve_random_states():
            generator_states = read_generators(loader)
            self._draw_states.restore(state["made"])
            self._draw_states.restore(state["begun"])
            indices = remaining_indices(loader, state["order"], state["items"])
            restore_generators(loader, generator_states)
        if indices is not None:
            self._remaining = _RemainingIndices(indices, state)
            self.exact = True

    def batches_left(self) -> int | None:
        """Return the batches left in the resumed epoch; None if the loader has no length."""
        if self._remaining is not None:
            return len(self._remaining.indices)
        used: int = self._resume_state["used"] if self._resume_state is not None else 0
        try:
            return len(self._loader()) - used  # type: ignore[arg-type]
        except TypeError:
            return None

    def restore_generators(self, state: dict[str, Any]) -> None:
        """Restore the generators of the loader and its samplers, and the samplers' counters."""
        loader = self._loader()
        if loader is not None:
            restore_generators(loader, state.get("generators", []))
            self._draw_states.restore_counters(state.get("counts", []))


class _RemainingIndices(NamedTuple):
    """The resharded rest of an epoch. ``state`` is the position from which it was computed."""

    indices: list[Any]
    state: dict[str, Any]


class _TrackedSampler:
    """An index sampler as the loader's iterator sees it. ``ltui_original`` is the sampler."""

    def __init__(self, sampler: Any, position: DataLoaderPosition) -> None:
        self.ltui_original = sampler
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return self._position.begin_pass(self.ltui_original)

    def __len__(self) -> int:
        return len(self.ltui_original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ltui_original, name)


class _DrawStates:
    """All states from which a loader's order is drawn.

    They are the rank's random states, the generators of the loader and its samplers, and the
    samplers' counters. Counters are plain attributes that samplers change while they are iterated,
    such as an epoch that a sampler counts by itself. Samplers with ``set_epoch`` are left out,
    because Lightning sets their epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._initial_counters = [_plain_attributes(sampler) for sampler in self._counting()]

    def _counting(self) -> list[Any]:
        samplers = {id(s): s for s in samplers_of(self._loader()) if s is not None}
        return [s for s in samplers.values() if not hasattr(s, "set_epoch")]

    def read(self) -> dict[str, Any]:
        """Return the current states in weights-only types."""
        return {
            "global": read_random_states(),
            "own": read_generators(self._loader()),
            "counts": self.counter_changes(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Set the states to a value of ``read``."""
        restore_random_states(saved["global"])
        restore_generators(self._loader(), saved["own"])
        self.restore_counters(saved.get("counts", []))

    def counter_changes(self) -> list[dict[str, Any]]:
        """Return, for each sampler, the attributes that changed since training started."""
        current = [_plain_attributes(sampler) for sampler in self._counting()]
        return [
            {name: value for name, value in new.items() if name not in old or old[name] != value}
            for new, old in zip(current, self._initial_counters, strict=False)
        ]

    def restore_counters(self, saved: list[dict[str, Any]]) -> None:
        """Set the attributes to their initial values and apply a value of ``counter_changes``."""
        initial_counters = self._initial_counters
        for sampler, initial, changes in zip(
            self._counting(), initial_counters, saved, strict=False
        ):
            for name in _plain_attributes(sampler).keys() - initial.keys():
                del vars(sampler)[name]  # a class attribute until the first count
            vars(sampler).update({**initial, **changes})


def _plain_attributes(sampler: Any) -> dict[str, Any]:
    values = getattr(sampler, "__dict__", {})
    return {name: value for name, value in values.items() if type(value) in _COUNTER_TYPES}


class _SamplerPass:
    """Iterator over the index sampler for one epoch.

    A sampler draws its order when it is iterated or when the first index is read. Therefore the
    states at both times are recorded.
    """

    __slots__ = (
        *("_checksums", "_drawn", "_indices", "_shards_batches", "dropped", "exact"),
        *("items_before", "order", "states", "states_at_first_draw", "states_when_created"),
    )

    def __init__(
        self,
        sampler: Any,
        states: _DrawStates,
        checksums_kept: int,
        saved: dict[str, Any] | None,
        loader: Any,
        remaining: _RemainingIndices | None,
    ) -> None:
        self.states = states
        self.dropped = 0
        self.exact = True
        self.items_before = 0
        """Items that all ranks used before the remaining ones were resharded."""
        self._shards_batches = shards_batches(loader)
        self._drawn = 0
        self._checksums: deque[tuple[int, int]] = deque([(0, 0)], maxlen=checksums_kept + 1)
        """Checksum and number of items after each of the last draws."""
        self.states_at_first_draw: dict[str, Any] | None = None
        if remaining is not None:
            state = remaining.state
            self.order, self.items_before = state["order"], state["items"]
            self.states_when_created, self.states_at_first_draw = state["made"], state["begun"]
            self._indices = iter(remaining.indices)
            return
        self.order = describe_order(loader)
        if saved is None:
            self.states_when_created = self.states.read()
            self._indices = iter(sampler)
            return
        with preserve_random_states():
            self._drop_used(sampler, saved)

    def _drop_used(self, sampler: Any, saved: dict[str, Any]) -> None:
        """Draw the saved epoch's order again and drop the indices that were used."""
        self.states_when_created, self.states_at_first_draw = saved["made"], saved["begun"]
        self.states.restore(saved["made"])
        self._indices = iter(sampler)
        self.states.restore(saved["begun"])
        for _ in range(saved["used"]):
            if next(self, None) is None:
                break
        self.dropped = self._drawn
        self.exact = self._checksums[-1][0] == saved["sum"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.states_at_first_draw is None:
            self.states_at_first_draw = self.states.read()
        indices = next(self._indices)
        self._drawn += 1
        checksum, items = self._checksums[-1]
        counts_samples = isinstance(indices, (list, tuple)) and not self._shards_batches
        items += len(indices) if counts_samples else 1
        self._checksums.append((_checksum(checksum, indices), items))
        return indices

    def checksum_and_items(self, used: int) -> tuple[int | None, int | None]:
        """Return checksum and number of items of the first ``used`` draws.

        Workers draw ahead, so these are not the last draws. Return None for both if they are no
        longer kept.
        """
        ahead = self._drawn - used
        kept = 0 <= ahead < len(self._checksums)
        return self._checksums[-1 - ahead] if kept else (None, None)


def shut_down(loader: Any) -> None:
    """Discard the iterator that a DataLoader keeps between epochs.

    With ``persistent_workers`` the loader would reuse it, and an iterator that already exists is
    not tracked.
    """
    if persistent_iterator(loader) is None or not isinstance(loader, DataLoader):
        return
    discard_iterator(loader)


def _checksum(checksum_before: int, indices: Any) -> int:
    try:
        return zlib.crc32(array("q", indices), checksum_before)
    except (TypeError, OverflowError):  # not a batch of integers
        return zlib.crc32(repr(indices).encode(), checksum_before)
