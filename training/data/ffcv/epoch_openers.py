"""Functions that open an epoch of a ``.beton`` file for ``RankLoader``: FFCV or DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from ltui.training.data.ffcv.beton_file import BetonFile
from ltui.training.data.ffcv.epoch_order import EpochOrder
from ltui.training.data.ffcv.keyed_random import epoch_key
from ltui.training.data.ffcv.torch_dataset import FILLERS, BetonSamples, collate
from ltui.training.data.sample_order import OpenBatches, torch_batches


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
