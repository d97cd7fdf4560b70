"""The DataLoader inside of the loaders that Fabric and accelerate prepare.

Both give the sampler the number of the pass by a counter of their own, which starts at 0 in each
process. accelerate fetches one batch ahead, to know which one is the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ltui.training.rank.lightning_internals import FABRIC_PASSES, fabric_loader


@dataclass(frozen=True, slots=True)
class WrappedLoader:
    """What a program iterates, and the loader that reads the data."""

    outer: Any
    inner: Any
    """The loader whose position is tracked; None if that of ``outer`` cannot be known."""
    passes: str | None = None
    """Attribute of ``outer`` that counts its passes."""
    fetches_ahead: bool = False

    def set_passes(self, passes: int) -> None:
        """Set the number of passes before the one that begins."""
        if self.passes is not None:
            setattr(self.outer, self.passes, passes)

    def fetched_ahead(self, used: int) -> int:
        """Return how many batches are fetched of which the program has not had its turn."""
        return int(self.fetches_ahead and used < len(self.inner))


def unwrap_loader(loader: Any) -> WrappedLoader:
    """Return the loader inside of ``loader``, which is itself if no library has wrapped it."""
    if (inner := fabric_loader(loader)) is not None:
        return WrappedLoader(loader, inner, FABRIC_PASSES)
    if not any(base.__module__ == "accelerate.data_loader" for base in type(loader).__mro__):
        return WrappedLoader(loader, loader)
    if hasattr(loader, "dl_state_dict"):  # it wraps a StatefulDataLoader
        return WrappedLoader(loader, loader, "iteration")
    inner = getattr(loader, "base_dataloader", None)
    if type(loader).__name__ == "DataLoaderShard" and isinstance(inner, DataLoader):
        return WrappedLoader(loader, inner, "iteration", fetches_ahead=True)
    return WrappedLoader(loader, None, "iteration")
