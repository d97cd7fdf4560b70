"""A LightningDataModule for sequences in memory-mapped files, batched by length and padded.

Without files it makes synthetic signals: each class is a sum of sines, and lengths vary widely. A
sample has 8 columns (sensors) and 20 to 400 rows (time); most samples are short. The class
determines the frequencies, which all sensors share. Each sensor has its own phase, amplitude and
noise.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ltui.training.data.data_files import data_folder
from ltui.training.data.rank_data_module import RankData
from ltui.training.data.sample_order import RankLoader
from ltui.training.data.sequence_dataset import LengthOrder, Padded, SequenceDataset, pad
from ltui.training.data.sequence_writer import DATA_SUFFIX, INDEX_SUFFIX, SequenceWriter

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


_CLASSES = _COLUMNS = 8
_SHORTEST, _LONGEST = 20, 400
_FREQUENCIES = np.linspace(0.03, 0.35, _CLASSES)
_NOISE = 0.5


def signals(samples: int, seed: int) -> Iterator[tuple[npt.NDArray[Any], int]]:
    """Yield samples: (values (rows, 8) float32, label 0 to 7)."""
    random = np.random.default_rng(seed)
    for number in range(samples):
        label = number % _CLASSES
        rows = int(_SHORTEST + (_LONGEST - _SHORTEST) * random.beta(1, 4))
        time = np.arange(rows)[:, None]
        low, high = _FREQUENCIES[label], _FREQUENCIES[(label * 3 + 1) % _CLASSES]
        phases = random.uniform(0, 2 * np.pi, (2, _COLUMNS))
        amplitude = random.uniform(0.5, 1.5, (2, _COLUMNS))
        values = amplitude[0] * np.sin(2 * np.pi * low * time + phases[0])
        values += amplitude[1] * np.sin(2 * np.pi * high * time + phases[1])
        values += random.normal(0, _NOISE, values.shape)
        yield values.astype(np.float32), label


def write_signals(path: Path, samples: int, seed: int) -> None:
    """Write signals to ``path`` unless the file exists.

    If several ranks call this, one writes and the others wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(f".{path.stem}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if all(path.with_suffix(s).exists() for s in (DATA_SUFFIX, INDEX_SUFFIX)):
            return
        with SequenceWriter(path, columns=_COLUMNS) as out:
            for values, label in signals(samples, seed):
                out.add(values, label)
    finally:
        os.close(lock)
