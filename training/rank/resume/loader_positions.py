"""The positions of all training loaders of a Trainer.

There are four kinds of loaders: a DataLoader whose sampler is tracked
(``dataloader_position.py``), a stateful loader and a loader without a position
(``loader_order.py``), and FFCV's ``Loader``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ltui.training.rank.lightning_internals import loader_iterator
from ltui.training.rank.resume.dataloader_position import DataLoaderPosition, shut_down
from ltui.training.rank.resume.loader_order import StatefulLoaderPosition, drop_used_batches
from ltui.training.rank.resume.plain_data import (
    States,
    is_plain_data,
    preserve_random_states,
    read_random_states,
    restore_random_states,
)


def is_ffcv_loader(loader: Any) -> bool:
    """Return True if ``loader`` is FFCV's, without importing FFCV."""
    return any(
        base.__name__ == "Loader" and base.__module__.partition(".")[0] == "ffcv"
        for base in type(loader).__mro__
    )


class FfcvLoaderPosition:
    """Tracks the position of one ``Loader`` of FFCV. ``epoch()`` returns the Trainer's epoch.

    The loader's order depends on a seed, which it draws if none is given, and on the number of
    epochs that it began, which starts at 0 in each process. Here that number follows the Trainer's
    epochs, and a resumed epoch begins after the used samples. No sample is read for that.
    """

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


_HAVE_GENERATORS = (DataLoaderPosition, StatefulLoaderPosition)
_Position = DataLoaderPosition | StatefulLoaderPosition | FfcvLoaderPosition


class LoaderPositions:
    """Tracks, saves and restores the positions of the training loaders."""

    def __init__(self, epoch: Callable[[], int] = int) -> None:
        """``epoch()`` returns the Trainer's epoch."""
        self._epoch = epoch
        self.inexact: list[str] = []
        """Differences from training without a resume, as middles of sentences."""
        self.used: list[tuple[int, int]] = []
        """(length, used batches) after ``resume``, for each loader with a known length.

        With other ranks or another batch size, the number of used batches is that which fits the
        present length."""
        self._loaders: list[Any] = []
        self._positions: list[_Position | None] = []
        """The position of each loader; None for a loader without one."""
        self._states_at_epoch_start: States | None = None
        self._batches_to_replay = 0
        self._over = False

    # While training.

    def track(self, loaders: list[Any]) -> None:
        """Track ``loaders``. Call it when they exist and before they are iterated."""
        self.detach()
        self._loaders = loaders
        for loader in loaders:
            shut_down(loader)
        self._positions = [_position_of(loader, self._epoch) for loader in loaders]

    def epoch_begins(self) -> None:
        """Record the random states from which loaders without a position begin this epoch.

        Call it before the loaders are iterated.
        """
        if None in self._positions and not self._batches_to_replay:
            self._states_at_epoch_start = read_random_states()

    def states(self, fetcher: Any) -> dict[str, Any]:
        """Return all positions in weights-only types. ``fetcher`` is Lightning's data fetcher."""
        fetched_ahead = list(getattr(fetcher, "batches", ()))
        states: list[dict[str, Any]] = []
        for position in self._positions:
            if isinstance(position, DataLoaderPosition):
                states.append(position.state(len(fetched_ahead)))
            else:
                states.append({} if position is None else position.state())
        saved: dict[str, Any] = {
            "loaders": states,
            "began": self._states_at_epoch_start,
            "ahead": [],
        }
        if fetched_ahead and any(isinstance(p, StatefulLoaderPosition) for p in self._positions):
            # The loader's own state counts these unused batches as used.
            saved["ahead"] = fetched_ahead if is_plain_data(fetched_ahead) else None
        return saved

    def detach(self) -> None:
        """Give the user's loaders their own methods back."""
        for position in self._positions:
            if position is not None:
                position.detach()
        self._positions, self._loaders = [], []

    # Resuming.

    def resume(self, saved: dict[str, Any], batches: int, *, same_ranks: bool, over: bool) -> None:
        """Make the loaders resume after ``batches`` batches of this epoch.

        Call it before the loaders are iterated and after their samplers' epoch is set. ``over``
        says that all batches of the epoch were used; then a validation or the next epoch follows.
        """
        states, self._batches_to_replay, self._over = saved["loaders"], 0, over
        if len(states) != len(self._loaders):
            self.inexact.append("the training data has another number of loaders than before")
            return
        for loader, position, state in zip(self._loaders, self._positions, states, strict=True):
            if text := describe_inexact_loader(loader):
                self.inexact.append(text)
            if isinstance(position, StatefulLoaderPosition) and "state" in state:
                self._resume_stateful(loader, position, state, batches, same_ranks=same_ranks)
            elif isinstance(position, FfcvLoaderPosition) and "seed" in state:
                position.resume(state, batches if same_ranks and not over else 0)
                if batches and not (same_ranks or over):
                    self._resume_without_position(loader, saved, batches, same_ranks=False)
            elif over:
                continue
            elif isinstance(position, DataLoaderPosition) and "used" in state:
                self._resume_tracked(loader, position, state)
            elif batches:
                self._resume_without_position(loader, saved, batches, same_ranks=same_ranks)
        self.used = list(self._used_batches())

    def resume_at_epoch_start(self, saved: dict[str, Any]) -> None:
        """Prepare the loaders for an epoch of which no batch was used.

        Call it before the loaders are iterated.
        """
        for position, state in zip(self._positions, saved["loaders"], strict=False):
            if isinstance(position, FfcvLoaderPosition) and "seed" in state:
                position.resume(state, 0)

    def _used_batches(self) -> Iterator[tuple[int, int]]:
        """Yield length and used batches of each loader that knows how many batches are left."""
        for loader, position in zip(self._loaders, self._positions, strict=True):
            left = position.batches_left() if isinstance(position, _HAVE_GENERATORS) else None
            if left is not None:
                yield len(loader), len(loader) - left

    def _resume_tracked(self, loader: Any, position: DataLoaderPosition, state: Any) -> None:
        if not position.resume(state):
            if not position.exact:
                self.inexact.append(
                    f"the order of {_name_of(loader)} can't be redistributed: this epoch starts "
                    "again, so some samples are used twice"
                )
            return
        if loader.num_workers:
            self.inexact.append(
                "random draws of the dataset inside its workers (augmentation), if any, differ "
                "until this epoch ends"
            )

    def _resume_stateful(
        self,
        loader: Any,
        position: StatefulLoaderPosition,
        state: Any,
        batches: int,
        *,
        same_ranks: bool,
    ) -> None:
        if same_ranks or callable(getattr(loader, "batches_left", None)):
            position.resume(state)
        elif batches:
            self.inexact.append(
                f"the position of {_name_of(loader)} is valid only for the number of ranks that "
                f"saved it: the loader starts again, so {batches} batches of this epoch are used "
                "twice"
            )

    def _resume_without_position(
        self, loader: Any, saved: Any, batches: int, *, same_ranks: bool
    ) -> None:
        if same_ranks and saved.get("began") is not None and len(self._loaders) == 1:
            self._batches_to_replay, self._states_at_epoch_start = batches, saved["began"]
            restore_random_states(saved["began"])
            return
        self.inexact.append(
            f"{_name_of(loader)} has no position that could be restored: it starts again, so the "
            f"first {batches} batches of this epoch are used twice"
        )

    def after_iterators_created(self, fetcher: Any, saved: dict[str, Any]) -> str | None:
        """Finish the resume once the loaders' iterators exist.

        Return a sentence about batches that were read again, which takes time, or None.
        """
        for number, loader in enumerate(self._loaders if self._over else ()):
            if isinstance(self._positions[number], StatefulLoaderPosition) and isinstance(
                loader, DataLoader
            ):
                # Then the loader counts the epoch as finished.
                with preserve_random_states():
                    next(loader_iterator(fetcher, number), None)
        fetched_ahead = saved.get("ahead", [])
        if fetched_ahead is None:
            self.inexact.append("one batch that had been fetched ahead could not be saved")
        elif fetched_ahead and hasattr(fetcher, "batches") and not self._over:
            fetcher.batches[:0] = [tuple(item) for item in fetched_ahead]
            fetcher.done = False
        batches, self._batches_to_replay = self._batches_to_replay, 0
        if not batches:
            return None
        if text := drop_used_batches(fetcher, batches):
            self.inexact.append(text)
        return (
            f"{_name_of(self._loaders[0])} has no position: the first {batches} batches of this "
            "epoch were read again and dropped"
        )

    def check_dropped_indices(self) -> None:
        """Record in ``inexact`` if a sampler drew another order than before the checkpoint.

        Call it before the first batch.
        """
        for position in self._positions:
            if isinstance(position, DataLoaderPosition) and not position.exact:
                self.inexact.append(
                    "a sampler draws another order than before, so in this epoch some samples "
                    "are used twice and others not at all"
                )

    def restore_generators(self, saved: dict[str, Any]) -> None:
        """Restore the generators of all loaders and their samplers."""
        for position, state in zip(self._positions, saved["loaders"], strict=False):
            if isinstance(position, _HAVE_GENERATORS) and "generators" in state:
                position.restore_generators(state)


def _position_of(loader: Any, epoch: Callable[[], int]) -> _Position | None:
    if is_ffcv_loader(loader):
        return FfcvLoaderPosition(loader, epoch)
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return StatefulLoaderPosition(loader)
    tracks = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return DataLoaderPosition(loader) if tracks else None


def _name_of(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        return f"the DataLoader of {type(loader.dataset).__name__}"
    return f"the loader ({type(loader).__name__})"
