"""The order of an epoch's samples for loaders of ``.beton`` files: random, page by page, or as
stored; with or without what is left over; with padding that can be told from samples.

What ``order.py`` says of ``RankOrder`` holds: the order depends on seed and epoch, is dealt to the
ranks like cards, and what all have used is its beginning.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ltui.training.data.sample_order import OpenBatches, RankLoader, RankOrder, split_among_ranks

Order = Literal["random", "quasi_random", "sequential"]
POOL_BYTES = 256 << 20
"""Samples of so many bytes of pages are shuffled with each other in quasi-random order."""
_LEAST_POOL = 8


class EpochOrder(RankOrder):
    """Sample numbers of one rank, epoch by epoch; ``samples`` stands for padding where ``pad``."""

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        order: Order = "random",
        drop_last: bool = False,
        pad: bool = False,
        page_of: npt.NDArray[np.int64] | None = None,
        page_bytes: int = 8 << 20,
    ) -> None:
        """``page_of``: the page of each sample; quasi-random order needs it. ``pad``: even out the
        ranks with padding, as a measurement needs it, instead of samples that come twice.
        ``ValueError`` where ``drop_last`` leaves nothing."""
        super().__init__(
            samples,
            rank=rank,
            world_size=world_size,
            shuffle=order != "sequential",
            filler=samples if pad else None,
        )
        self.kind = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.streams = world_size
        """Into how many parts quasi-random order deals the pages: one for each rank that there was
        when the epoch began."""
        self._page_of = page_of
        self._pool = max(_LEAST_POOL, POOL_BYTES // page_bytes)
        if drop_last and self.remaining(0) == 0:
            raise ValueError(
                f"{samples} samples do not fill one batch of {batch_size} on each of {world_size} "
                "ranks, and drop_last leaves out what does not: lower the batch size."
            )

    def __len__(self) -> int:
        return self.remaining(0)

    def remaining(self, used: int) -> int:
        if not self.drop_last:
            return super().remaining(used)
        together = self.batch_size * self.world_size
        return max(0, self.samples - used) // together * self.batch_size

    def draw(self, used: int = 0) -> list[int]:
        order = self.whole()
        if self.drop_last:
            order = order[: used + self.remaining(used) * self.world_size]
        return split_among_ranks(order.tolist(), used, self.rank, self.world_size, self.filler)

    def whole(self) -> npt.NDArray[np.int64]:
        """All ranks' samples of this epoch, in the order in which they are dealt."""
        if self.kind == "sequential":
            return np.arange(self.samples)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        if self.kind == "random":
            return torch.randperm(self.samples, generator=generator).numpy()
        if self._page_of is None:
            raise ValueError("quasi-random order needs the page of each sample")
        return quasi_random(self._page_of, self.streams, self._pool, generator)


def quasi_random(
    page_of: npt.NDArray[np.int64], streams: int, pool: int, generator: torch.Generator
) -> npt.NDArray[np.int64]:
    """A random order in which the samples ``r``, ``r + streams``, ``r + 2 * streams`` and so on
    lie in few pages at a time.

    The pages are put into a random order and cut into as many equal parts as there are streams (a
    page at a cut belongs to both); within a part, the samples of ``pool`` pages after the other
    are shuffled.
    """
    samples = len(page_of)
    pages, page_index = np.unique(page_of, return_inverse=True)
    place = torch.randperm(len(pages), generator=generator).numpy()
    by_page = np.argsort(place[page_index], kind="stable")
    chance = torch.rand(samples, generator=generator, dtype=torch.float64).numpy()
    dealt = np.empty(samples, dtype=np.int64)
    begin = 0
    for stream in range(min(streams, samples)):
        size = len(range(stream, samples, streams))
        part = by_page[begin : begin + size]
        begin += size
        places = place[page_index[part]]
        pools = (places - places[0]) // pool
        dealt[stream::streams] = part[np.lexsort((chance[part], pools))]
    return dealt


class BetonLoader(RankLoader):
    """A rank's batches by an ``EpochOrder``."""

    sampler: EpochOrder

    def __init__(self, order: EpochOrder, open_batches: OpenBatches) -> None:
        super().__init__(order, order.batch_size, open_batches)

    def _take_position(self) -> int:
        used = super()._take_position()
        if not used:
            self.sampler.streams = self.sampler.world_size
        return used

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "streams": self.sampler.streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.sampler.streams = int(state.get("streams", self.sampler.world_size))
