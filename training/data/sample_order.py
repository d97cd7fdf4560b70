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

import torch
from torch.utils.data import DataLoader, Dataset, Subset

Batch = Any
OpenBatches = Callable[[list[int]], Iterable[Batch]]
"""Function that returns the batches of the given sample numbers, in this order."""


class RankOrder:
    """Sample numbers of one rank in each epoch. Lightning calls ``set_epoch``."""

    def __init__(
        self,
        samples: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        filler: int | None = None,
    ) -> None:
        """``filler``: number of the sample that pads the ranks; None: samples are drawn twice."""
        self.samples = samples
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.filler = filler
        self.epoch = 0
        self.seed = int(os.environ.get("PL_GLOBAL_SEED") or 0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.samples / self.world_size)

    def draw(self, used: int = 0) -> list[int]:
        """Return this rank's sample numbers in the current epoch, equally many on every rank.

        The first ``used`` samples of all ranks together are left out.
        """
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        else:
            order = list(range(self.samples))
        return split_among_ranks(order, used, self.rank, self.world_size, self.filler)

    def remaining(self, used: int) -> int:
        """Return the number of samples that each rank draws after the first ``used``."""
        return math.ceil(max(0, self.samples - used) / self.world_size)


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
        return {"epoch": epoch, "samples": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resume_at = state["epoch"], state["samples"]


def torch_batches(dataset: Dataset[Any], batch_size: int, workers: int = 0) -> OpenBatches:
    """Return a function that opens the batches of an epoch with torch's DataLoader."""

    def open_batches(order: list[int]) -> Iterable[Batch]:
        # Without a generator, a DataLoader draws a seed from the rank's random state when it is
        # opened, and a resumed epoch is opened once more than an uninterrupted one.
        return DataLoader(
            Subset(dataset, order),
            batch_size=batch_size,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
        )

    return open_batches
