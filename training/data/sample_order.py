"""Which samples a rank draws, in which order, and where in it an interrupted epoch goes on.

Every rank gets the same number of batches. The order depends on the seed and the epoch alone, and
is dealt to the ranks like cards, so what all ranks have used after so many batches is the beginning
of it. A resumed run shares out the rest, among the same number of ranks or another: each sample
that was not yet used comes exactly once.

What ``RankLoader`` offers is what resuming asks of any loader that keeps its own position
(docs/architecture.md, "Positions in the data").
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
"""Given sample numbers in order, their batches."""


class RankOrder:
    """Sample numbers of one rank, epoch by epoch. Lightning calls ``set_epoch``."""

    def __init__(
        self,
        samples: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        filler: int | None = None,
    ) -> None:
        """``filler`` is the sample that evens out the ranks; None: samples are drawn twice."""
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
        """This rank's sample numbers of this epoch, without the first ``used`` of all ranks; as
        many on every rank."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        else:
            order = list(range(self.samples))
        return split_among_ranks(order, used, self.rank, self.world_size, self.filler)

    def remaining(self, used: int) -> int:
        """How many samples each rank draws after ``used``."""
        return math.ceil(max(0, self.samples - used) / self.world_size)


def split_among_ranks(
    order: Sequence[int], used: int, rank: int, world_size: int, filler: int | None = None
) -> list[int]:
    """What ``rank`` gets of ``order`` from ``used`` on. Where it does not come out even, the ranks
    are filled up with ``filler``, or with the order's first samples as torch's
    ``DistributedSampler`` does."""
    rest = list(order[used:])
    lacking = -len(rest) % world_size
    source = order if filler is None else [filler]
    rest += itertools.islice(itertools.cycle(source), lacking)
    return rest[rank::world_size]


class RankLoader:
    """A rank's batches, from whatever opens them (torch's DataLoader, FFCV).

    Lightning saves ``state_dict`` in every checkpoint, and loads it before the first batch.
    """

    inexact: str | None = None
    """What of the batches to come is not as it would have been after ``load_state_dict``, as the
    middle of a sentence; None where all is."""

    def __init__(self, order: RankOrder, batch_size: int, open_batches: OpenBatches) -> None:
        # Lightning looks for both, as torch's DataLoader has them.
        self.sampler = order
        self.batch_sampler: Any = None
        self.batch_size = batch_size
        self._open = open_batches
        self.inexact = getattr(open_batches, "inexact", None)
        self._first = 0
        self._drawn = 0
        self._go_on: tuple[int, int] | None = None
        self._reading: weakref.ref[Generator[Batch, None, None]] | None = None

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        reading = self._read()
        self._reading = weakref.ref(reading)
        return reading

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
        """Give up an epoch that was not read to its end, and the threads that read ahead."""
        if self._reading is not None and (reading := self._reading()) is not None:
            reading.close()

    def _take_position(self) -> int:
        epoch, used = self._go_on or (-1, 0)
        self._go_on = None
        return used if epoch == self.sampler.epoch and self.sampler.remaining(used) else 0

    @property
    def used(self) -> int:
        """Samples that all ranks together have used of this epoch."""
        if self._go_on is not None:
            return self._go_on[1]  # nothing was read since
        return self._first + self._drawn * self.batch_size * self.sampler.world_size

    def batches_left(self) -> int:
        """After ``load_state_dict``: how many batches each rank still gets in that epoch."""
        return math.ceil(self.sampler.remaining(self.used) / self.batch_size)

    def state_dict(self) -> dict[str, int]:
        """The same on every rank, and for every number of ranks."""
        epoch = self.sampler.epoch if self._go_on is None else self._go_on[0]
        return {"epoch": epoch, "samples": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._go_on = state["epoch"], state["samples"]


def torch_batches(dataset: Dataset[Any], batch_size: int, workers: int = 0) -> OpenBatches:
    """What ``RankLoader`` opens an epoch with: torch's DataLoader."""

    def open_batches(order: list[int]) -> Iterable[Batch]:
        # By itself a DataLoader draws a seed from the rank's random states when it is opened, and a
        # resumed epoch is opened once more than one that was never stopped.
        return DataLoader(
            Subset(dataset, order),
            batch_size=batch_size,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
        )

    return open_batches
