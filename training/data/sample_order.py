"""Order of a rank's samples in an epoch, and the position at which an interrupted epoch resumes.

Every rank gets the same number of batches. The order depends only on the seed and the epoch, and
its samples are assigned to the ranks in turn. The samples that all ranks together have used after a
number of batches are therefore the beginning of the order. A resumed run distributes the remaining
samples over the same or another number of ranks, and each of them occurs exactly once.

``RankLoader`` has the interface that a resume requires of a loader with a stateful position
(docs/protocols.md, "Positions in the data").
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

Batch = Any
OpenBatches = Callable[[list[int]], Iterable[Batch]]
"""Function that returns the batches of the given sample numbers, in this order."""


class RankOrder:
    """Sample numbers of one rank in each epoch. Lightning calls ``set_epoch``."""

    layout_key: str | None = None
    """Name in a saved position of the number on which the order depends besides seed and epoch."""

    def __init__(
        self,
        samples: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        filler: int | None = None,
        drop_last: bool = False,
        batch_size: int = 1,
    ) -> None:
        """``filler``: number of the sample that pads the ranks; None: samples are drawn twice.
        ``drop_last``: leave out samples that do not fill a batch on every rank."""
        self.samples = samples
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.filler = filler
        self.drop_last = drop_last
        self.batch_size = batch_size
        self.epoch = 0
        self.seed = int(os.environ.get("PL_GLOBAL_SEED") or 0)
        self.layout = world_size
        self._kept_layout: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def layout_of(self, epoch: int) -> int:
        """Return the layout of an epoch. A resumed epoch keeps the one with which it began."""
        kept_epoch, kept = self._kept_layout or (None, self.layout)
        return kept if kept_epoch == epoch else self.layout

    def keep_layout(self, epoch: int, layout: int) -> None:
        """Restore the order of ``epoch``, which began with another layout."""
        self._kept_layout = epoch, layout

    def __len__(self) -> int:
        return self.remaining(0)

    def global_order(self) -> npt.NDArray[np.int64]:
        """Return the samples of all ranks in the order in which they are assigned to the ranks."""
        if not self.shuffle:
            return np.arange(self.samples)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator).numpy()

    def draw(self, used: int = 0) -> list[int]:
        """Return this rank's sample numbers in the current epoch, equally many on every rank.

        The first ``used`` samples of all ranks together are left out.
        """
        order = self.global_order()
        if self.drop_last:
            order = order[: used + self.remaining(used) * self.world_size]
        return split_among_ranks(order.tolist(), used, self.rank, self.world_size, self.filler)

    def remaining(self, used: int) -> int:
        """Return the number of samples that each rank draws after the first ``used``."""
        samples = max(0, self.samples - used)
        if self.drop_last:
            return samples // (self.batch_size * self.world_size) * self.batch_size
        return math.ceil(samples / self.world_size)


def split_among_ranks(
    order: Sequence[int], used: int, rank: int, world_size: int, filler: int | None = None
) -> list[int]:
    """Return the samples of ``rank`` among ``order[used:]``, which are assigned to ranks in turn.

    If their number is no multiple of ``world_size``, they are padded with ``filler``, or with the
    first samples of the order as torch's ``DistributedSampler`` does.
    """
    remaining = list(order[used:])
    missing = -len(remaining) % world_size
    source = order if filler is None else [filler]
    remaining += itertools.islice(itertools.cycle(source), missing)
    return remaining[rank::world_size]


class RankLoader:
    """Loader of a rank's batches, which ``open_batches`` reads (torch's DataLoader or FFCV).

    Lightning saves ``state_dict()`` in every checkpoint and loads it before the first batch.
    """

    inexact: str | None = None
    """Differences of the remaining batches after ``load_state_dict``, as a part of a sentence.

    None if they do not differ from those of an uninterrupted epoch.
    """

    def __init__(self, order: RankOrder, batch_size: int, open_batches: OpenBatches) -> None:
        # Lightning reads both attributes, which torch's DataLoader has.
        self.sampler = order
        self.batch_sampler: Any = None
        self.batch_size = batch_size
        self._open = open_batches
        self.inexact = getattr(open_batches, "inexact", None)
        self._first = 0
        self._drawn = 0
        self._resume_at: tuple[int, int] | None = None
        self._iterator: weakref.ref[Generator[Batch, None, None]] | None = None

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        iterator = self._read()
        self._iterator = weakref.ref(iterator)
        return iterator

    def _read(self) -> Generator[Batch, None, None]:
        self._first, self._drawn = self._take_position(), 0
        batches = iter(self._open(self.sampler.draw(self._first)))
        try:
            for batch in batches:
                self._drawn += 1
                yield batch
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def close(self) -> None:
        """Close an epoch that was not read to its end, and the threads that read ahead."""
        if self._iterator is not None and (iterator := self._iterator()) is not None:
            iterator.close()

    def _take_position(self) -> int:
        epoch, used = self._resume_at or (-1, 0)
        self._resume_at = None
        return used if epoch == self.sampler.epoch and self.sampler.remaining(used) else 0

    @property
    def used(self) -> int:
        """Number of samples of this epoch that all ranks together have used."""
        if self._resume_at is not None:
            return self._resume_at[1]  # nothing has been read since ``load_state_dict``
        return self._first + self._drawn * self.batch_size * self.sampler.world_size

    def batches_left(self) -> int:
        """Return the number of remaining batches per rank in the epoch of ``load_state_dict``."""
        return math.ceil(self.sampler.remaining(self.used) / self.batch_size)

    def state_dict(self) -> dict[str, int]:
        """Return the position, which is equal on all ranks and for every number of ranks."""
        epoch = self.sampler.epoch if self._resume_at is None else self._resume_at[0]
        key = self.sampler.layout_key
        layout = {} if key is None else {key: self.sampler.layout_of(epoch)}
        return {"epoch": epoch, "samples": self.used, **layout}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resume_at = state["epoch"], state["samples"]
        if self.sampler.layout_key in state:
            self.sampler.keep_layout(state["epoch"], state[self.sampler.layout_key])


def torch_batches(
    dataset: Dataset[Any], batch_size: int, workers: int = 0, **options: Any
) -> OpenBatches:
    """Return a function that opens the batches of an epoch with torch's DataLoader.

    ``options``: further arguments of the DataLoader.
    """

    def open_batches(order: list[int]) -> Iterable[Batch]:
        # Without a generator, a DataLoader draws a seed from the rank's random state when it is
        # opened, and a resumed epoch is opened once more than an uninterrupted one.
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=order,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
            **options,
        )

    return open_batches
