"""Order of the samples of an epoch for loaders of ``.beton`` files.

The order is random, quasi-random (page by page) or sequential. Incomplete batches can be dropped,
and padding can be distinguished from samples. As in ``sample_order.RankOrder``, the order depends
on seed and epoch, its samples are assigned to the ranks in turn, and the samples that all ranks
have used are its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ltui.training.data.ffcv.beton_file import BetonFile
from ltui.training.data.ffcv.image_transform import epoch_key
from ltui.training.data.ffcv.torch_dataset import FILLERS, BetonSamples, collate
from ltui.training.data.sample_order import OpenBatches, RankLoader, RankOrder, torch_batches

Order = Literal["random", "quasi_random", "sequential"]
POOL_BYTES = 256 << 20
"""Size of the pool of pages in which quasi-random order shuffles samples."""
_MIN_POOL_PAGES = 8


class EpochOrder(RankOrder):
    """Sample numbers of one rank in each epoch. With ``pad``, number ``samples`` is padding."""

    layout_key = "streams"
    """Number of parts into which quasi-random order divides the pages: the ranks when the epoch
    began."""

    def __init__(  # noqa: PLR0913  (keywords, as DataLoader has them)
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
        """``page_of``: page of each sample, required for quasi-random order. ``pad``: pad the ranks
        with padding instead of repeated samples, as metrics require. Raises ``ValueError`` if
        ``drop_last`` drops all samples.
        """
        super().__init__(
            samples,
            rank=rank,
            world_size=world_size,
            shuffle=order != "sequential",
            filler=samples if pad else None,
            drop_last=drop_last,
            batch_size=batch_size,
        )
        self.kind = order
        self._page_of = page_of
        self._pool = max(_MIN_POOL_PAGES, POOL_BYTES // page_bytes)
        if drop_last and self.remaining(0) == 0:
            raise ValueError(
                f"{samples} samples do not fill one batch of {batch_size} on each of {world_size} "
                "ranks, and drop_last drops incomplete batches: reduce the batch size."
            )

    def global_order(self) -> npt.NDArray[np.int64]:
        if self.kind != "quasi_random":
            return super().global_order()
        if self._page_of is None:
            raise ValueError("quasi-random order needs the page of each sample")
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return quasi_random(self._page_of, self.layout_of(self.epoch), self._pool, generator)


def quasi_random(
    page_of: npt.NDArray[np.int64], streams: int, pool: int, generator: torch.Generator
) -> npt.NDArray[np.int64]:
    """Return a random order in which each stream reads only a few pages at a time.

    Stream ``r`` consists of the samples at ``r``, ``r + streams``, ``r + 2 * streams`` and so on.
    The pages are put into a random order and divided into one part per stream, all equally large. A
    page at a border belongs to both parts. Within a part, the samples of every ``pool`` successive
    pages are shuffled.
    """
    samples = len(page_of)
    pages, page_index = np.unique(page_of, return_inverse=True)
    place = torch.randperm(len(pages), generator=generator).numpy()
    by_page = np.argsort(place[page_index], kind="stable")
    random_keys = torch.rand(samples, generator=generator, dtype=torch.float64).numpy()
    order = np.empty(samples, dtype=np.int64)
    begin = 0
    for stream in range(min(streams, samples)):
        size = len(range(stream, samples, streams))
        part = by_page[begin : begin + size]
        begin += size
        places = place[page_index[part]]
        pools = (places - places[0]) // pool
        order[stream::streams] = part[np.lexsort((random_keys[part], pools))]
    return order


class BetonLoader(RankLoader):
    """Loader of a rank's batches in an ``EpochOrder``."""

    def __init__(self, order: EpochOrder, open_batches: OpenBatches) -> None:
        super().__init__(order, order.batch_size, open_batches)


def ffcv_batches(
    reader: Any, order: EpochOrder, sides: Mapping[int, int] | None = None
) -> OpenBatches:
    """Return a function that opens batches of ``reader``, an ``FfcvReader`` with any fields.

    ``sides``: resolution of the images by the first epoch for which it applies.
    """
    fillers = [FILLERS.get(reader.file.fields[i].type_id) for i in reader.columns]

    def open_batches(numbers: list[int]) -> Iterator[Any]:
        if side := side_at_epoch(sides, order.epoch):
            reader.set_side(side)
        drawn = np.array(numbers, dtype=np.int64)
        padding = drawn == order.samples
        # Padding reads any sample of the batch, and its label is then replaced.
        drawn[padding] = drawn[0] if not padding[0] else 0
        size, begin = order.batch_size, 0
        with closing(reader.batches(drawn, epoch_key(order.seed, order.epoch))) as batches:
            for batch in batches:
                _mark_padding(batch, padding[begin : begin + size], fillers)
                begin += size
                yield batch

    vars(open_batches)["inexact"] = reader.inexact  # for the loader's message on resume
    return open_batches


def _mark_padding(batch: Sequence[Any], padding: Any, fillers: Sequence[Any]) -> None:
    # There is little padding, at the end of a rank's samples.
    for place in np.flatnonzero(padding).tolist():
        for value, filler in zip(batch, fillers, strict=True):
            if filler is not None:
                value[place] = filler


def side_at_epoch(sides: Mapping[int, int] | None, epoch: int) -> int | None:
    """Return the resolution in an epoch; None if none is configured."""
    started = [first for first in sides or {} if first <= epoch]
    return (sides or {})[max(started)] if started else None


def dataloader_batches(
    samples: BetonSamples,
    order: EpochOrder,
    workers: int,
    sides: Mapping[int, int] | None = None,
    pin_memory: bool = False,
) -> OpenBatches:
    """Return a function that opens the same batches on the CPU with torch's DataLoader."""
    batches = torch_batches(
        samples, order.batch_size, workers, collate_fn=collate, pin_memory=pin_memory
    )

    def open_batches(numbers: list[int]) -> Iterable[Any]:
        if side := side_at_epoch(sides, order.epoch):
            samples.set_side(side)
        samples.key = epoch_key(order.seed, order.epoch)
        return batches(numbers)

    return open_batches


def uniform_side(file: BetonFile, column: int) -> int | None:
    """Return the side of the images if all are squares of equal size, else None."""
    heights, widths = file.image_sides(column)
    side = int(heights[0])
    return side if bool((heights == side).all() and (widths == side).all()) else None
