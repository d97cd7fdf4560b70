"""Where FFCV's own ``Loader`` is in its epoch, and how another goes on from there.

Its order depends on a seed, which it draws where none is given, and on a count of the epochs that
it began, which starts anew in each process. Here the count follows the Trainer's epochs, and an
epoch that goes on begins after the samples that were used: no sample is read for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def is_ffcv_loader(loader: Any) -> bool:
    """Whether ``loader`` is FFCV's, without importing it."""
    return any(
        base.__name__ == "Loader" and base.__module__.partition(".")[0] == "ffcv"
        for base in type(loader).__mro__
    )


class FfcvLoaderPosition:
    """Follows one ``Loader``. ``epoch()``: the Trainer's."""

    def __init__(self, loader: Any, epoch: Callable[[], int]) -> None:
        self._loader = weakref.ref(loader)
        self._epoch = epoch
        self._before: int = loader.next_epoch - epoch()
        """Epochs that it began before those of this training."""
        self._drawn: tuple[int, Any] | None = None
        self._drop = (-1, 0)
        """In which epoch how many batches were used."""
        loader.next_traversal_order = self._order

    def detach(self) -> None:
        if (loader := self._loader()) is not None:
            loader.__dict__.pop("next_traversal_order", None)

    def _order(self) -> Any:
        loader: Any = self._loader()
        epoch = self._before + self._epoch()
        loader.next_epoch = epoch  # it adds one itself
        if self._drawn is None or self._drawn[0] != epoch:
            # Once for an epoch: quasi-random order shuffles what the last left.
            self._drawn = epoch, loader.traversal_order.sample_order(epoch)
        order, (epoch_that_goes_on, batches) = self._drawn[1], self._drop
        if epoch != epoch_that_goes_on:
            return order
        return order[: len(loader) * loader.batch_size][batches * loader.batch_size :]

    def state(self) -> dict[str, Any]:
        loader: Any = self._loader()
        return {"before": self._before, "seed": int(loader.seed)}

    def resume(self, state: dict[str, Any], batches: int) -> None:
        """``batches`` of the Trainer's epoch were used."""
        loader: Any = self._loader()
        traversal = loader.traversal_order
        self._before, loader.seed = state["before"], state["seed"]
        for owner in (traversal, getattr(traversal, "sampler", None)):
            if owner is not None:
                owner.seed = state["seed"]
        epoch = self._before + self._epoch()
        self._drop = epoch, batches
        if callable(begin := getattr(traversal, "prepare_data_structures", None)):
            begin()
            for drawn in (0, *range(epoch)):  # it was drawn once as the loader was made
                traversal.sample_order(drawn)

    def batches_left(self) -> None:
        """Lightning's own count holds."""

    def restore_generators(self, state: dict[str, Any]) -> None:
        """It has none."""
