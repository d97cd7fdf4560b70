"""FFCV for small arrays in memory: writing a ``.beton``, and batches of it in a given order.

FFCV takes seconds to import (numba) and is optional, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

_NOTICE_S = 1.0
"""The thread looks every half second whether it was closed."""
_PAGE_BYTES = 2 << 20
"""FFCV's least; its default wastes megabytes on small data."""


def has_ffcv() -> bool:
    """Whether FFCV is installed, without importing it."""
    return find_spec("ffcv") is not None


def write_beton(path: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Write uint8 ``images`` (n, channels, height, width) and integer ``labels`` unless it exists.

    The file appears whole or not at all. Call it on one rank of a machine; the others wait.
    """
    if path.exists():
        return
    from ffcv.fields import IntField, NDArrayField
    from ffcv.writer import DatasetWriter

    part = path.with_name(f".{path.name}.{os.getpid()}")
    fields = {
        "image": NDArrayField(np.dtype(np.uint8), tuple(images.shape[1:])),
        "label": IntField(),
    }
    dataset = TensorDataset(images, labels)
    try:
        pairs = _Pairs(dataset)
        writer = DatasetWriter(str(part), fields, page_size=_PAGE_BYTES, num_workers=1)
        writer.from_indexed_dataset(pairs)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class _Pairs:
    """Samples as the writer wants them: an array and a plain number."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.dataset[index]
        return image.numpy(), int(label)


def _end(batches: Any) -> None:
    """Have FFCV's reading thread end: one that still reads while Python ends aborts it."""
    batches.close()
    batches.join(_NOTICE_S)
    while batches.is_alive():
        # It has read everything and waits to say so.
        with contextlib.suppress(Empty):
            batches.output_queue.get_nowait()
        batches.join(_NOTICE_S)


def beton_batches(
    path: Path, batch_size: int, device: torch.device
) -> Callable[[list[int]], Iterator[Any]]:
    """What ``RankLoader`` opens an epoch with: FFCV's loader, compiled once."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.ndarray import NDArrayDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToDevice, ToTensor

    there = [ToDevice(device, non_blocking=True)] if device.type == "cuda" else []
    loader = Loader(
        str(path),
        batch_size=batch_size,
        num_workers=1,
        order=OrderOption.SEQUENTIAL,
        seed=0,  # not drawn from the rank's random states; the order is given anyway
        drop_last=False,
        pipelines={
            "image": [NDArrayDecoder(), ToTensor(), *there],
            "label": [IntDecoder(), ToTensor(), Squeeze(1), *there],
        },
    )

    def open_batches(order: list[int]) -> Iterator[Any]:
        # "Sequential" is the order of these indices as they stand, whatever it is.
        loader.traversal_order.indices = np.array(order, dtype=np.uint64)
        batches = iter(loader)
        try:
            yield from batches
        finally:
            _end(batches)

    return open_batches
