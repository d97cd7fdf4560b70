"""Which samples a rank draws, in which order, and where in it an interrupted epoch goes on.

Every rank gets the same number of batches. The order depends on the seed and the epoch alone, so a
resumed run continues with exactly the batches that were not yet seen.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
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

    def draw(self) -> list[int]:
        """This epoch's sample numbers; as many on every rank."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        else:
            order = list(range(self.samples))
        lacking = len(self) * self.world_size - self.samples
        fill = order[:lacking] if self.filler is None else [self.filler] * lacking
        return (order + fill)[self.rank :: self.world_size]


class RankLoader:
    """A rank's batches, from whatever opens them (torch's DataLoader, FFCV).

    Lightning saves ``state_dict`` in every checkpoint, and loads it before the first batch.
    """

    def __init__(self, order: RankOrder, batch_size: int, open_batches: OpenBatches) -> None:
        # Lightning looks for both, as torch's DataLoader has them.
        self.sampler = order
        self.batch_sampler: Any = None
        self.batch_size = batch_size
        self._open = open_batches
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
        self._drawn = self._first_batch()
        batches = iter(self._open(self.sampler.draw()[self._drawn * self.batch_size :]))
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

    def _first_batch(self) -> int:
        epoch, batches = self._go_on or (-1, 0)
        self._go_on = None
        return batches if epoch == self.sampler.epoch and batches < len(self) else 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.sampler.epoch, "batches": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._go_on = state["epoch"], state["batches"]


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
