"""The positions of all training loaders of a Trainer.

There are four kinds of loaders: a DataLoader whose sampler is tracked
(``dataloader_position.py``), a stateful loader and a loader without a position
(``stateful_loader_position.py``), and FFCV's ``Loader`` (``ffcv_position.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from ltui.training.rank.lightning_internals import loader_iterator
from ltui.training.rank.resume.dataloader_position import (
    DataLoaderPosition,
    can_track,
    is_stateful_loader,
    shut_down,
)
from ltui.training.rank.resume.ffcv_position import (
    FfcvLoaderPosition,
    describe_inexact_loader,
    is_ffcv_loader,
)
from ltui.training.rank.resume.nested_tensors import is_plain_data
from ltui.training.rank.resume.random_states import (
    States,
    read_random_states,
    restore_random_states,
)
from ltui.training.rank.resume.stateful_loader_position import (
    BatchReplay,
    StatefulLoaderPosition,
    exhaust_iterator,
)

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
            batches_left = None if position is None else position.batches_left()
            if batches_left is not None and batches_left != float("inf"):
                yield len(loader), len(loader) - int(batches_left)

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
                exhaust_iterator(loader_iterator(fetcher, number))
        fetched_ahead = saved.get("ahead", [])
        if fetched_ahead is None:
            self.inexact.append("one batch that had been fetched ahead could not be saved")
        elif fetched_ahead and hasattr(fetcher, "batches") and not self._over:
            fetcher.batches[:0] = [tuple(item) for item in fetched_ahead]
            fetcher.done = False
        batches, self._batches_to_replay = self._batches_to_replay, 0
        if not batches:
            return None
        if text := BatchReplay(fetcher, batches).run():
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
            if position is not None and "generators" in state:
                position.restore_generators(state)


def _position_of(loader: Any, epoch: Callable[[], int]) -> _Position | None:
    if is_ffcv_loader(loader):
        return FfcvLoaderPosition(loader, epoch)
    if is_stateful_loader(loader):
        return StatefulLoaderPosition(loader)
    return DataLoaderPosition(loader) if can_track(loader) else None


def _name_of(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        return f"the DataLoader of {type(loader.dataset).__name__}"
    return f"the loader ({type(loader).__name__})"
