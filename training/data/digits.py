"""Handwritten digits of scikit-learn: 1,797 grey images of 8x8 pixels with values 0 to 16.

A fifth is used for validation. The last image is blank and has the label ``NO_LABEL``. It pads the
ranks in validation, so that every digit counts exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import TensorDataset

from ltui.training.data.data_files import data_folder
from ltui.training.data.ffcv.beton_file import BetonFile
from ltui.training.data.ffcv.ffcv_environment import has_ffcv, keep_torch_threads, uses_ffcv
from ltui.training.data.rank_data_module import NO_LABEL, RankData, Variant
from ltui.training.data.sample_order import OpenBatches, RankLoader, RankOrder

VALIDATION_FRACTION = 0.2
_BETON = "digits-1.beton"
_MAX_PIXEL = 16.0
_PAGE_BYTES = 2 << 20
"""Minimum page size of FFCV. Its default wastes megabytes on small data."""


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images (n, 1, 8, 8) as uint8 and their labels, shuffled; the last is blank."""
    from sklearn.datasets import load_digits  # local: its import takes a second

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.as_tensor(digits.images).to(torch.uint8).unsqueeze(1)[order]
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    blank = torch.zeros(1, *images.shape[1:], dtype=torch.uint8)
    return torch.cat([images, blank]), torch.cat([labels, torch.tensor([NO_LABEL])])


class Digits(RankData):
    """Batches of (images as floats from 0 to 1, labels)."""

    def __init__(
        self,
        batch_size: int = 32,
        loader: Literal["auto", "ffcv", "torch"] = "auto",
        folder: str | None = None,
        workers: int = 0,
    ) -> None:
        """``loader``: ``auto`` uses FFCV if it is installed. ``folder``: folder of FFCV's file.
        ``workers``: processes of torch's DataLoader."""
        super().__init__()
        self.workers = workers
        self.batch_size = batch_size
        self.with_ffcv = uses_ffcv(loader)
        self.folder = folder
        self._batches: OpenBatches | None = None
        self.images, self.labels = load_images()
        self.samples = len(self.labels) - 1
        self.held_out = int(self.samples * VALIDATION_FRACTION)
        """Number of samples for validation, which are the first."""

    def prepare_data(self) -> None:
        # Lightning calls this on one rank of each machine while the other ranks wait.
        if self.with_ffcv:
            write_beton(data_folder(self.folder) / _BETON, self.images, self.labels)

    def train_dataloader(self) -> RankLoader:
        order = RankOrder(self.samples - self.held_out, **self.ranks(), shuffle=True)
        return self.open_loader(order, self._open(self.held_out))

    def val_dataloader(self) -> RankLoader:
        order = RankOrder(self.held_out, **self.ranks(), filler=self.samples)
        return self.open_loader(order, self._open(0))

    def loader_variants(self, counts: Sequence[int]) -> list[Variant]:
        """Return the variants that ``ltui bench data`` compares: FFCV and torch's DataLoader."""

        def with_loader(variant: Variant, ffcv: bool) -> Variant:
            def open_loader() -> Iterable[Any]:
                self.with_ffcv = ffcv
                self.prepare_data()
                return variant.open()

            setting = {"data.init_args.loader": "ffcv" if ffcv else "torch"}
            return replace(variant, open=open_loader, settings={**setting, **variant.settings})

        variants = [with_loader(variant, ffcv=False) for variant in super().loader_variants(counts)]
        if has_ffcv():
            variants.insert(0, with_loader(Variant("FFCV", 1, self.train_dataloader), ffcv=True))
        return variants

    def _open(self, first: int) -> OpenBatches:
        """Return a function that opens batches of samples, numbered from ``first``."""
        if self.with_ffcv and self.trainer is not None:
            if self._batches is None:
                # Training and validation share one reader, because compiling it takes seconds.
                path = data_folder(self.folder) / _BETON
                device = self.trainer.strategy.root_device
                self._batches = beton_batches(path, self.batch_size, device)
            batches = self._batches
            return lambda order: batches([first + i for i in order])
        dataset = TensorDataset(self.images, self.labels)
        open_batches = self.worker_batches(dataset)
        return lambda order: open_batches([first + i for i in order])

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ARG002
        images, labels = batch
        return images.float() / _MAX_PIXEL, labels.long()


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
        # Local: FFCV is optional, and importing it takes seconds.
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
        # Local: FFCV is optional, and importing it takes seconds.
        from ltui.training.data.ffcv.ffcv_reader import FfcvReader
        from ltui.training.data.ffcv.field_pipelines import value_pipeline

    file = BetonFile(path)
    pipelines = {field.name: value_pipeline(field.type_id, device) for field in file.fields}
    reader = FfcvReader(file, pipelines, batch_size=batch_size, device=device, num_workers=1)
    return reader.batches
