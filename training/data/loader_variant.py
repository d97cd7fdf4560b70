"""Variants of loading the same data, which ``ltui bench data`` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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


def worker_variants(data: Any, counts: Sequence[int]) -> list[Variant]:
    """Return variants of a data module's training loader without workers and with each count.

    The data module's attribute ``workers`` is the number of processes of torch's DataLoader.
    """

    def loader_factory(workers: int) -> Callable[[], Iterable[Any]]:
        def open_loader() -> Iterable[Any]:
            data.workers = workers
            loader: Iterable[Any] = data.train_dataloader()
            return loader

        return open_loader

    return [
        Variant("DataLoader", n, loader_factory(n), {"data.init_args.workers": n})
        for n in sorted({0, *counts})
    ]
