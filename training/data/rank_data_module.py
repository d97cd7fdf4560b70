"""Base of the data modules whose loaders give every rank its part of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset

from ltui.training.data.sample_order import OpenBatches, RankLoader, RankOrder, torch_batches


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant: a loader with a number of workers."""

    loader: str
    """Name of the loader, such as ``FFCV`` or ``DataLoader``."""
    workers: int | None
    """Number of loading threads or processes; None if it can't be chosen."""
    open: Callable[[], Iterable[Any]]
    """Return a new loader for one round."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values of the configuration that select this variant."""

    @property
    def name(self) -> str:
        """Displayed name."""
        if self.workers is None:
            return self.loader
        return f"{self.loader}, {self.workers} {'worker' if self.workers == 1 else 'workers'}"


NO_LABEL = -1
"""Label of a sample that only pads a batch. Models neither train on it nor count it."""


class RankData(LightningDataModule):
    """Data module with ``RankLoader``s, which it closes."""

    batch_size: int
    workers: int
    """Number of processes of torch's DataLoader."""

    def __init__(self) -> None:
        super().__init__()
        self._loaders: list[RankLoader] = []

    def ranks(self) -> dict[str, Any]:
        """Return the arguments ``rank`` and ``world_size`` of an order."""
        if self.trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def worker_batches(self, dataset: Dataset[Any], **options: Any) -> OpenBatches:
        """Return a function that opens the batches of ``dataset`` with torch's DataLoader.

        They are in pinned memory if the rank has a GPU, so that a copy to it does not wait.
        """
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return torch_batches(dataset, self.batch_size, self.workers, pin_memory=pin, **options)

    def open_loader(self, order: RankOrder, open_batches: OpenBatches) -> RankLoader:
        """Return a loader, which ``close`` closes."""
        self._loaders.append(RankLoader(order, self.batch_size, open_batches))
        return self._loaders[-1]

    def loader_variants(self, counts: Sequence[int]) -> list[Variant]:
        """Return the variants that ``ltui bench data`` compares: no workers, and each count."""

        def loader_factory(workers: int) -> Callable[[], Iterable[Any]]:
            def open_loader() -> Iterable[Any]:
                self.workers = workers
                loader: Iterable[Any] = self.train_dataloader()
                return loader

            return open_loader

        return [
            Variant("DataLoader", n, loader_factory(n), {"data.init_args.workers": n})
            for n in sorted({0, *counts})
        ]

    def close(self) -> None:
        """Close all loaders."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
