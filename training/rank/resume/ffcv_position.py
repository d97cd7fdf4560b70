"""The position of FFCV's own ``Loader`` in its epoch, and how a new loader resumes there.

The loader's order depends on a seed, which it draws if none is given, and on the number of epochs
that it began, which starts at 0 in each process. Here that number follows the Trainer's epochs, and
a resumed epoch begins after the used samples. No sample is read for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any


def is_ffcv_loader(loader: Any) -> bool:
    """Return True if ``loader`` is FFCV's, without importing FFCV."""
    return any(
        base.__name__ == "Loader" and base.__module__.partition(".")[0] == "ffcv"
        for base in type(loader).__mro__
    )


class FfcvLoaderPosition:
    """Tracks the position of one ``Loader``. ``epoch()`` returns the Trainer's epoch."""

    def __init__(self, loader: Any, epoch: Callable[[], int]) -> None:
        self._loader = weakref.ref(loader)
        self._epoch = epoch
        self._epochs_before: int = loader.next_epoch - epoch()
        """Epochs that the loader began before the first epoch of this training."""
        self._drawn: tuple[int, Any] | None = None
        """The loader's epoch and its order, once drawn."""
        self._used = (-1, 0)
        """The loader's epoch that is resumed, and the number of its batches that were used."""
        loader.next_traversal_order = self._next_order

    def detach(self) -> None:
        """Give the loader its own method back."""
        if (loader := self._loader()) is not None:
            loader.__dict__.pop("next_traversal_order", None)

    def _next_order(self) -> Any:
        """Return the order of the epoch that begins, without the used samples."""
        loader: Any = self._loader()
        epoch = self._epochs_before + self._epoch()
        loader.next_epoch = epoch  # the loader itself adds one
        if self._drawn is None or self._drawn[0] != epoch:
            # Drawn once for each epoch: quasi-random order shuffles the previous order.
            self._drawn = epoch, loader.traversal_order.sample_order(epoch)
        order, (resumed_epoch, used_batches) = self._drawn[1], self._used
        if epoch != resumed_epoch:
            return order
        return order[: len(loader) * loader.batch_size][used_batches * loader.batch_size :]

    def state(self) -> dict[str, Any]:
        """Return the position in weights-only types. Lightning counts the batches."""
        loader: Any = self._loader()
        return {"before": self._epochs_before, "seed": int(loader.seed)}

    def resume(self, state: dict[str, Any], batches: int) -> None:
        """Resume after ``batches`` batches of the Trainer's present epoch."""
        loader: Any = self._loader()
        traversal = loader.traversal_order
        self._epochs_before, loader.seed = state["before"], state["seed"]
        for owner in (traversal, getattr(traversal, "sampler", None)):
            if owner is not None:
                owner.seed = state["seed"]
        epoch = self._epochs_before + self._epoch()
        self._used = epoch, batches
        if callable(prepare := getattr(traversal, "prepare_data_structures", None)):
            prepare()
            # The order was drawn once when the loader was created, then once for each epoch.
            for drawn_epoch in (0, *range(epoch)):
                traversal.sample_order(drawn_epoch)

    def batches_left(self) -> None:
        """Return None: Lightning's own counter is right."""

    def restore_generators(self, state: dict[str, Any]) -> None:
        """Do nothing: the loader has no generators."""


def describe_inexact_operations(operations: Iterable[Any]) -> str | None:
    """Return what a resume can't restore of an FFCV pipeline, as the middle of a sentence.

    Return None if none of ``operations`` is known to draw at random in FFCV's threads.
    """
    names = dict.fromkeys(type(o).__name__ for o in operations if _draws_at_random(o))
    if not names:
        return None
    several = len(names) > 1
    return (
        f"FFCV's {' and '.join(names)} draw{'' if several else 's'} at random in threads of "
        f"{'their' if several else 'its'} own, so images are changed differently than without the "
        "resume"
    )


def describe_inexact_loader(loader: Any) -> str | None:
    """Return what a resume can't restore of ``loader``, as the middle of a sentence, or None.

    A loader may say it in its attribute ``inexact``. For FFCV's own ``Loader`` the operations of
    its pipelines decide.
    """
    if text := getattr(loader, "inexact", None):
        return str(text)
    specs = getattr(loader, "pipeline_specs", None)
    if not (is_ffcv_loader(loader) and isinstance(specs, dict)):
        return None
    return describe_inexact_operations(
        operation
        for spec in specs.values()
        for operation in (getattr(spec, "decoder", None), *getattr(spec, "transforms", ()))
    )


def _draws_at_random(operation: Any) -> bool:
    wrapped = getattr(operation, "module", None)  # a torchvision module in FFCV's ModuleWrapper
    return any(
        "Random" in base.__name__ or base.__name__ == "Cutout"
        for each in (operation, wrapped)
        for base in type(each).__mro__
    )
