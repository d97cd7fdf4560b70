"""One way to load the same data, for ``ltui bench data``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A loader with a number of workers."""

    loader: str
    """``FFCV``, ``DataLoader``."""
    workers: int | None
    """Threads or processes that load; None where that can't be chosen."""
    open: Callable[[], Iterable[Any]]
    """Gives the loader of one round."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the configuration that choose this variant."""

    @property
    def name(self) -> str:
        if self.workers is None:
            return self.loader
        return f"{self.loader}, {self.workers} {'worker' if self.workers == 1 else 'workers'}"


def worker_variants(data: Any, counts: Sequence[int]) -> list[Variant]:
    """The training loader of a data module whose ``workers`` are processes of torch's DataLoader:
    without any, and with each of these counts."""

    def opening(workers: int) -> Callable[[], Iterable[Any]]:
        def make() -> Iterable[Any]:
            data.workers = workers
            loader: Iterable[Any] = data.train_dataloader()
            return loader

        return make

    return [
        Variant("DataLoader", n, opening(n), {"data.init_args.workers": n})
        for n in sorted({0, *counts})
    ]
