"""Text as bytes in windows of equal length: the user's files, or the manual included in Python."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ltui.training.data.rank_data_module import NO_LABEL, RankData
from ltui.training.data.sample_order import RankLoader, RankOrder

VALIDATION_FRACTION = TEST_FRACTION = 0.05


class TextMissingError(ValueError):
    """There is no text, or less than one window. The message says what to do."""


def python_manual() -> bytes:
    """Return the topics of Python's ``help()``: about 700 kB of English, part of every Python."""
    from pydoc_data.topics import topics  # local: half a megabyte that only this function needs

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(files: str | list[str] | None) -> npt.NDArray[np.uint8]:
    """Return the bytes of all files with these names or patterns, by default Python's manual."""
    if files is None:
        return np.frombuffer(python_manual(), np.uint8)
    patterns = [files] if isinstance(files, str) else files
    paths = [p for pattern in patterns for p in sorted(glob.glob(os.path.expanduser(pattern)))]
    if not paths:
        raise TextMissingError(f"No file matches {', '.join(patterns)}: set data.init_args.files.")
    if len(paths) == 1:
        return np.memmap(paths[0], np.uint8, "r")
    return np.concatenate([np.frombuffer(Path(p).read_bytes(), np.uint8) for p in paths])


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Adjacent windows of the text: (bytes (context,), next bytes (context,)) as int64.

    Number ``len(windows)`` is the padding sample, which has only ``NO_LABEL`` as next bytes.
    """

    def __init__(self, text: npt.NDArray[np.uint8], context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = number * self.context
        if number == len(self):
            blank = torch.zeros(self.context, dtype=torch.int64)
            return blank, torch.full_like(blank, NO_LABEL)
        window = torch.from_numpy(self.text[begin : begin + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


class Text(RankData):
    """Batches of windows. The last 5 % of the text are for test, the 5 % before for validation."""

    def __init__(
        self,
        files: str | list[str] | None = None,
        context: int = 256,
        batch_size: int = 16,
        workers: int = 0,
    ) -> None:
        """``files``: a file, a pattern or a list of them; by default Python's own manual.
        ``context``: bytes in a window. ``batch_size``: windows per rank."""
        super().__init__()
        self.files = files
        self.context = context
        self.batch_size = batch_size
        self.workers = workers
        self._splits: dict[str, Windows] = {}

    def setup(self, stage: str) -> None:  # noqa: ARG002
        if self._splits:
            return
        text = read_text(self.files)
        test = len(text) - int(len(text) * TEST_FRACTION)
        validation = test - int(len(text) * VALIDATION_FRACTION)
        splits = {"train": text[:validation], "val": text[validation:test], "test": text[test:]}
        self._splits = {name: Windows(split, self.context) for name, split in splits.items()}
        if not all(len(split) for split in self._splits.values()):
            raise TextMissingError(
                f"{len(text)} bytes of text are too few for windows of {self.context}: add files "
                "to data.init_args.files, or reduce data.init_args.context."
            )

    def train_dataloader(self) -> RankLoader:
        return self._loader(self._splits["train"], shuffle=True)

    def val_dataloader(self) -> RankLoader:
        return self._loader(self._splits["val"], filler=len(self._splits["val"]))

    def test_dataloader(self) -> RankLoader:
        return self._loader(self._splits["test"], filler=len(self._splits["test"]))

    def _loader(self, windows: Windows, **options: Any) -> RankLoader:
        # Ranks that split layers (tensor parallel) get the same windows.
        sampler_options = (self.trainer and self.trainer.distributed_sampler_kwargs) or {}
        order = RankOrder(
            len(windows),
            rank=sampler_options.get("rank", 0),
            world_size=sampler_options.get("num_replicas", 1),
            **options,
        )
        return self.open_loader(order, self.worker_batches(windows))
