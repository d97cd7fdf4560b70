"""Training data as ltui's own data modules read it: sequences in memory-mapped files, batches by
length, and ``.beton`` files by FFCV in its three orders and by torch's DataLoader."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from ltui.training.data.beton_data import BetonData
from ltui.training.data.ffcv.beton_file import BetonFile
from ltui.training.data.ffcv.epoch_order import BetonLoader, EpochOrder, Order
from ltui.training.data.sample_order import OpenBatches, RankLoader, torch_batches
from ltui.training.data.sequence_dataset import (
    LengthBatchSampler,
    LengthOrder,
    SequenceDataset,
    pad,
)
from ltui.training.data.sequence_writer import SequenceWriter
from tests.rank.exactness.loaders import BATCH, Rows, samples
from tests.rank.exactness.world import GIVE_UP, HERE

SIDE = 16
PAGE = 3
"""Samples of a page, as quasi-random order is told; the file itself is smaller than a page."""
_WRITTEN_IN_S = 300.0


def written(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """A folder of files that rank 0 writes, for so many samples as there are; the others wait."""
    path = folder / f"{name}-{samples()}"
    part = path.with_name(f".{path.name}")
    if HERE.rank == 0 and not path.exists():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write(part)
        part.rename(path)
    deadline = time.monotonic() + _WRITTEN_IN_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)
    return path


def turned(batches: OpenBatches, turn: Callable[[Any], Any]) -> OpenBatches:
    def open_batches(numbers: list[int]) -> Iterable[Any]:
        # A generator: closing it closes the one within.
        opened = batches(numbers)
        try:
            for batch in opened:
                yield turn(batch)
        finally:
            if callable(close := getattr(opened, "close", None)):
                close()

    return open_batches


# By length.


def _length(number: int) -> int:
    return 1 + number * 7 % 11


class Varied(Dataset):
    """Sequences of different length and their numbers."""

    def __init__(self) -> None:
        self.rows = Rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        _, row = self.rows[number]
        return row.expand(_length(number), -1).numpy(), number


def _summed(batch: Any) -> Any:
    """(numbers, one row of each)."""
    return batch.labels, batch.values.sum(1) / 10


def _collated(found: Any) -> Any:
    return _summed(pad(found))


def length_batches(workers: int, folder: Path) -> Any:
    """ltui's sampler that batches by length, in torch's DataLoader."""
    order = LengthOrder(
        [_length(number) for number in range(samples())],
        BATCH,
        rank=HERE.rank,
        world_size=HERE.ranks,
        shuffle=True,
        group=4 * BATCH,
    )
    return DataLoader(
        Varied(),
        batch_sampler=LengthBatchSampler(order),
        collate_fn=_collated,
        num_workers=workers,
    )


def _write_sequences(folder: Path) -> None:
    rows = torch.randn(samples(), 8, generator=torch.Generator().manual_seed(0))
    with SequenceWriter(folder / "rows.seq", columns=8) as out:
        for number, row in enumerate(rows):
            out.add(row.expand(_length(number), -1).numpy(), label=number)


def sequences(workers: int, folder: Path) -> Any:
    """Memory-mapped, batched by length."""
    path = written(folder, "sequences", _write_sequences) / "rows.seq"
    dataset = SequenceDataset(path)
    order = LengthOrder(
        dataset.lengths(), BATCH, rank=HERE.rank, world_size=HERE.ranks, shuffle=True
    )
    return RankLoader(
        order, BATCH, turned(torch_batches(dataset, BATCH, workers, collate_fn=pad), _summed)
    )


# Images.


class _Pictures:
    """Noise; the label is the number."""

    def __len__(self) -> int:
        return samples()

    def __getitem__(self, number: int) -> Any:
        drawn = np.random.default_rng(number)
        pixels = drawn.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        return Image.fromarray(pixels), number


def _write_beton(folder: Path) -> None:
    # Local: it imports FFCV, which may be missing and takes seconds.
    from ltui.training.data.ffcv.beton_writer import WriteOptions, write

    write(_Pictures(), folder / "pictures.beton", WriteOptions(images="raw"), lambda *_: None)


@functools.cache
def _data(path: Path, loader: Literal["auto", "ffcv", "torch"]) -> BetonData:
    """Once for a process, because FFCV compiles the pipelines for seconds."""
    return BetonData(str(path), batch_size=BATCH, loader=loader, os_cache=True)


def _image_and_label(batch: Any) -> Any:
    """Eight values that the random flip, shift and crop change."""
    images, labels = batch
    return labels.clone(), images[:, 0, 5, 4:12].contiguous()


def _beton(folder: Path, loader: str, kind: Order, workers: int) -> Any:
    path = written(folder, "pictures", _write_beton) / "pictures.beton"
    data, file = _data(path, loader), BetonFile(path)
    order = EpochOrder(
        file.samples,
        batch_size=BATCH,
        rank=HERE.rank,
        world_size=HERE.ranks,
        order=kind,
        page_of=np.arange(file.samples) // PAGE,
    )
    through = data.through_ffcv if loader == "ffcv" else data.through_dataloader
    return BetonLoader(order, turned(through(file, order, True, workers), _image_and_label))


def ffcv_random(workers: int, folder: Path) -> Any:
    return _beton(folder, "ffcv", "random", 1)


def ffcv_quasi_random(workers: int, folder: Path) -> Any:
    return _beton(folder, "ffcv", "quasi_random", 1)


def ffcv_sequential(workers: int, folder: Path) -> Any:
    return _beton(folder, "ffcv", "sequential", 1)


def _ffcv_loader(folder: Path, kind: str) -> Any:
    # Local: it imports FFCV, which may be missing and takes seconds.
    from ffcv.fields.basics import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor

    if HERE.ranks > 1 and not torch.distributed.is_initialized():
        # It asks for its rank as it is made; Lightning takes the group that is there.
        torch.distributed.init_process_group("gloo", timeout=GIVE_UP)

    rows = Rows().rows

    class Turned(Loader):
        def __iter__(self) -> Any:
            return ((n.clone(), rows[n]) for (n,) in super().__iter__())

    return Turned(
        str(written(folder, "pictures", _write_beton) / "pictures.beton"),
        batch_size=BATCH,
        num_workers=1,
        order=getattr(OrderOption, kind),
        distributed=HERE.ranks > 1,
        # Images would be compiled for many seconds.
        pipelines={"image": None, "label": [IntDecoder(), ToTensor(), Squeeze(1)]},
    )


def ffcv_loader(workers: int, folder: Path) -> Any:
    """FFCV's own, as a script uses it."""
    return _ffcv_loader(folder, "RANDOM")


def ffcv_loader_quasi_random(workers: int, folder: Path) -> Any:
    return _ffcv_loader(folder, "QUASI_RANDOM")


def beton_torch(workers: int, folder: Path) -> Any:
    return _beton(folder, "torch", "random", workers)


MODULES = (
    *(length_batches, sequences),
    *(ffcv_random, ffcv_quasi_random, ffcv_sequential, beton_torch),
    *(ffcv_loader, ffcv_loader_quasi_random),
)
OF_FFCV = ("ffcv_random", "ffcv_quasi_random", "ffcv_sequential")
FFCVS_OWN = ("ffcv_loader", "ffcv_loader_quasi_random")
NEED_FFCV = (*OF_FFCV, *FFCVS_OWN, "beton_torch")
"""It writes the file, too."""
