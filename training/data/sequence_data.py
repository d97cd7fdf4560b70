"""A LightningDataModule for sequences in memory-mapped files, batched by length and padded."""

from __future__ import annotations

from typing import Any

import torch

from ltui.training.data.cache_folder import data_folder
from ltui.training.data.rank_data_module import RankData
from ltui.training.data.sample_order import RankLoader
from ltui.training.data.sequence_format.length_batches import LengthOrder, Padded, pad
from ltui.training.data.sequence_format.sequence_dataset import SequenceDataset
from ltui.training.data.sequence_format.synthetic_signals import write_signals

_SEEDS = {"train": 1, "val": 2, "test": 3}


class Sequences(RankData):
    """Batches of ``Padded``: values as floats, a mask and labels.

    The number and the size of the batches are equal on all ranks. In validation and test every
    sample occurs once, and samples that only pad a batch are labelled ``NO_LABEL``.
    """

    def __init__(  # noqa: PLR0913  (a configuration file names each parameter)
        self,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        batch_size: int = 32,
        drop_last: bool = False,
        made_up: int = 2000,
        folder: str | None = None,
        workers: int = 0,
        resident_mb: int = 256,
    ) -> None:
        """``train``, ``val``, ``test``: each a ``.seq`` file, a folder, a pattern or a list.
        ``made_up``: number of synthetic signals for training if ``train`` is not given, with a
        quarter of it each for validation and test. They are stored in ``folder``.
        ``batch_size``: samples per rank. ``resident_mb``: maximum size in MiB of the files that a
        process keeps in memory.
        """
        super().__init__()
        self.files = {"train": train, "val": val, "test": test}
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.made_up = made_up
        self.folder = folder
        self.workers = workers
        self.resident_bytes = resident_mb << 20
        self._datasets: dict[str, SequenceDataset] = {}

    def prepare_data(self) -> None:
        # Lightning calls this on one rank of each machine while the other ranks wait.
        if self.files["train"] is None:
            for part, seed in _SEEDS.items():
                write_signals(self._synthetic_path(part), self._synthetic_count(part), seed)

    def _synthetic_count(self, part: str) -> int:
        return self.made_up if part == "train" else max(1, self.made_up // 4)

    def _synthetic_path(self, part: str) -> Any:
        return data_folder(self.folder) / f"signals-1-{part}-{self._synthetic_count(part)}.seq"

    def train_dataloader(self) -> RankLoader:
        return self._loader(self._dataset("train"), shuffle=True, drop_last=self.drop_last)

    def val_dataloader(self) -> Any:
        return self._evaluation("val")

    def test_dataloader(self) -> Any:
        return self._evaluation("test")

    def _evaluation(self, part: str) -> Any:
        if self.files["train"] is not None and self.files[part] is None:
            return []
        dataset = self._dataset(part)
        return self._loader(dataset, filler=len(dataset))

    def _dataset(self, part: str) -> SequenceDataset:
        if part not in self._datasets:
            made_up = self.files["train"] is None
            files = self._synthetic_path(part) if made_up else self.files[part]
            assert files is not None
            self._datasets[part] = SequenceDataset(files, resident_bytes=self.resident_bytes)
        return self._datasets[part]

    def _loader(self, dataset: SequenceDataset, **options: Any) -> RankLoader:
        order = LengthOrder(dataset.lengths(), self.batch_size, **self.ranks(), **options)
        return self.open_loader(order, self.worker_batches(dataset, collate_fn=pad))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ARG002
        values, mask, labels = batch
        floats = values if torch.is_floating_point(values) else values.float()
        return Padded(floats, mask, labels)

    def close(self) -> None:
        """Close all loaders and files."""
        super().close()
        for dataset in self._datasets.values():
            dataset.close()
        self._datasets.clear()
