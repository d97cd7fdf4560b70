"""What ``RankLoader`` opens an epoch with, for a ``.beton`` file: FFCV, or torch's DataLoader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from ltui.training.data.ffcv.beton_file import FLOAT, INT, BetonFile
from ltui.training.data.ffcv.epoch_order import EpochOrder
from ltui.training.data.ffcv.keyed_random import epoch_key
from ltui.training.data.ffcv.torch_dataset import NO_LABEL, BetonSamples, collate
from ltui.training.data.sample_order import OpenBatches

_FILLERS = {INT: NO_LABEL, FLOAT: math.nan}


def ffcv_batches(
    reader: Any, order: EpochOrder, sides: Mapping[int, int] | None = None
) -> OpenBatches:
    """``reader``: an ``FfcvReader``, whose pipelines' fields may be anything. ``sides``: the
    images' resolution from an epoch on."""
    fillers = [_FILLERS.get(reader.file.fields[i].type_id) for i in reader.columns]

    def open_batches(numbers: list[int]) -> Iterator[Any]:
        if side := side_at_epoch(sides, order.epoch):
            reader.set_side(side)
        drawn = np.array(numbers, dtype=np.int64)
        padding = drawn == order.samples
        # Padding is read from a sample that is at hand, and then told from it by its label.
        drawn[padding] = drawn[0] if not padding[0] else 0
        size, begin = order.batch_size, 0
        with closing(reader.batches(drawn, epoch_key(order.seed, order.epoch))) as batches:
            for batch in batches:
                _mark(batch, padding[begin : begin + size], fillers)
                begin += size
                yield batch

    vars(open_batches)["inexact"] = reader.inexact  # for the loader's note on resume
    return open_batches


def _mark(batch: Sequence[Any], padding: Any, fillers: Sequence[Any]) -> None:
    # It is never long, and stands at the end of a rank's numbers.
    for place in np.flatnonzero(padding).tolist():
        for value, filler in zip(batch, fillers, strict=True):
            if filler is not None:
                value[place] = filler


def side_at_epoch(sides: Mapping[int, int] | None, epoch: int) -> int | None:
    """The resolution in an epoch; None where nothing is said of it."""
    begun = [first for first in sides or {} if first <= epoch]
    return (sides or {})[max(begun)] if begun else None


def dataloader_batches(
    samples: BetonSamples,
    order: EpochOrder,
    workers: int,
    sides: Mapping[int, int] | None = None,
    pin_memory: bool = False,
) -> OpenBatches:
    """The same batches, on the CPU."""

    def open_batches(numbers: list[int]) -> Iterable[Any]:
        if side := side_at_epoch(sides, order.epoch):
            samples.set_side(side)
        samples.key = epoch_key(order.seed, order.epoch)
        return DataLoader(
            Subset(samples, numbers),
            batch_size=order.batch_size,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(0),
        )

    return open_batches


def uniform_side(file: BetonFile, column: int) -> int | None:
    """The side of the images where all are squares of one size."""
    heights, widths = file.image_sides(column)
    side = int(heights[0])
    return side if bool((heights == side).all() and (widths == side).all()) else None
