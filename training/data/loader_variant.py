"""Variants of loading the same data, which ``ltui bench data`` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
