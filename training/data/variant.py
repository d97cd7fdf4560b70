"""One way to load the same data, for ``ltui bench data``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
