"""FFCV for small arrays in memory: write a ``.beton`` file, and read its batches in a given order.

FFCV takes seconds to import (numba) and is optional. It is therefore imported locally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ltui.training.data.cpu_memory_limits import keep_torch_threads
from ltui.training.data.ffcv.beton_file import BetonFile

_PAGE_BYTES = 2 << 20
"""Minimum page size of FFCV. Its default wastes megabytes on small data."""


def has_ffcv() -> bool:
    """Return True if FFCV is installed, without importing it."""
    return find_spec("ffcv") is not None


def uses_ffcv(loader: str) -> bool:
    """Return True if ``loader`` selects FFCV: ``ffcv``, or ``auto`` if it is installed."""
    if loader == "ffcv" and not has_ffcv():
        raise ValueError("FFCV is not installed: use loader=torch, or pip install ffcv")
    return loader != "torch" and has_ffcv()


def write_beton(path: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Write uint8 ``images`` (n, channels, height, width) and integer ``labels`` to ``path``.

    An existing file is kept. The file is created atomically. Call this on one rank of a machine
    while the other ranks wait.
    """
    if path.exists():
        return
    samples = [
        {"image": image.numpy(), "label": int(label)}
        for image, label in zip(images, labels, strict=True)
    ]
    with keep_torch_threads():
        from ltui.training.data.ffcv.beton_writer import WriteOptions, write

        options = WriteOptions(page_bytes=_PAGE_BYTES, workers=0)
        write(samples, path, options, lambda *_: None)


def beton_batches(
    path: Path, batch_size: int, device: torch.device
) -> Callable[[list[int]], Iterator[Any]]:
    """Return a function that opens batches with all fields unchanged, on ``device``.

    The pipelines are compiled here, once. Raises ``BetonError`` if the file can't be read.
    """
    with keep_torch_threads():
        from ltui.training.data.ffcv.ffcv_reader import FfcvReader
        from ltui.training.data.ffcv.field_pipelines import value_pipeline

    file = BetonFile(path)
    pipelines = {field.name: value_pipeline(field.type_id, device) for field in file.fields}
    reader = FfcvReader(file, pipelines, batch_size=batch_size, device=device, num_workers=1)
    return reader.batches
