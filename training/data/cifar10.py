"""CIFAR-10 from torchvision: 50,000 images for training, 10,000 for validation and test.

The images are held in memory as uint8 (180 MB per rank). One rank of each machine downloads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10

from ltui.training.data.data_files import data_folder
from ltui.training.data.rank_data_module import NO_LABEL, RankData
from ltui.training.data.sample_order import RankLoader, RankOrder


class DataMissingError(RuntimeError):
    """The data is missing and could not be downloaded. The text says what to do."""


class Cifar10(RankData):
    """Batches of (images as floats from -1 to 1, labels)."""

    def __init__(self, batch_size: int = 64, folder: str | None = None, workers: int = 0) -> None:
        """``folder``: folder of ``cifar-10-batches-py``, which is downloaded if it is missing."""
        super().__init__()
        self.workers = workers
        self.batch_size = batch_size
        self.folder = folder
        self._splits: dict[bool, TensorDataset] = {}

    def prepare_data(self) -> None:
        # Lightning calls this on one rank of each machine while the other ranks wait.
        folder = data_folder(self.folder)
        try:
            CIFAR10(str(folder), train=True, download=True)
        except (OSError, RuntimeError) as error:
            raise DataMissingError(_missing_data_text(folder, error)) from error

    def train_dataloader(self) -> RankLoader:
        return self._loader(train=True)

    def val_dataloader(self) -> RankLoader:
        return self._loader(train=False)

    def test_dataloader(self) -> RankLoader:
        return self._loader(train=False)

    def _loader(self, train: bool) -> RankLoader:
        dataset = self._read(train)
        # The last image is blank and not counted. It pads the ranks in validation and test.
        samples = len(dataset) - 1
        filler = None if train else samples
        order = RankOrder(samples, **self.ranks(), shuffle=train, filler=filler)
        return self.open_loader(order, self.worker_batches(dataset))

    def _read(self, train: bool) -> TensorDataset:
        if train not in self._splits:
            split = CIFAR10(str(data_folder(self.folder)), train=train)
            images = torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous()
            blank = torch.zeros(1, *images.shape[1:], dtype=torch.uint8)
            labels = torch.tensor([*split.targets, NO_LABEL])
            self._splits[train] = TensorDataset(torch.cat([images, blank]), labels)
        return self._splits[train]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ARG002
        images, labels = batch
        return images.float() / 127.5 - 1.0, labels


def _missing_data_text(folder: Path, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"CIFAR-10 is not in {folder} and could not be downloaded ({reason}). "
        f"Connect to the network, or unpack cifar-10-python.tar.gz in that folder, "
        f"or set data.init_args.folder to another folder."
    )
