"""The positions of all training loaders of a Trainer, whichever kind each of them has.

Four kinds: a DataLoader whose sampler is followed (``position.py``), a loader that keeps its own
position, one that has none (``kept.py``), and FFCV's (``ffcv_position.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from ltui.training.rank.resume.dataloader_position import (
    DataLoaderPosition,
    can_track,
    is_stateful_loader,
    shut_down,
)
from ltui.training.rank.resume.ffcv_position import FfcvLoaderPosition, is_ffcv_loader
from ltui.training.rank.resume.ffcv_random_operations import describe_inexact_loader
from ltui.training.rank.resume.random_states import (
    States,
    read_random_states,
    restore_random_states,
)
from ltui.training.rank.resume.stateful_loader import (
    BatchReplay,
    StatefulLoaderPosition,
    exhaust_iterator,
    is_plain_data,
)

_Position = DataLoaderPosition | StatefulLoaderPosition | FfcvLoaderPosition


class LoaderPositions:
    """``inexact`` collects, as middles of sentences, what will not be as it would have been."""

    def __init__(self, epoch: Callable[[], int] = int) -> None:
        """``epoch()``: the Trainer's."""
        self._epoch = epoch
        self.inexact: list[str] = []
        self.used: list[tuple[int, int]] = []
        """(length, batches used) after ``resume``, of each loader that can say it. For other ranks
        or batches of another size not what was used before, but what fits the length of now."""
        self._loaders: list[Any] = []
        self._positions: list[_Position | None] = []
        self._began: States | None = None
        self._replay = 0
        self._over = False

    # While training.

    def follow(self, loaders: list[Any]) -> None:
        """They are there, and not yet iterated."""
        self.detach()
        self._loaders = loaders
        for loader in loaders:
            shut_down(loader)
        self._positions = [_position(loader, self._epoch) for loader in loaders]

    def epoch_begins(self) -> None:
        """The loaders are about to be iterated. Those without a position begin from the random
        states of now."""
        if None in self._positions and not self._replay:
            self._began = read_random_states()

    def states(self, fetcher: Any) -> dict[str, Any]:
        """All of them, in weights-only types. ``fetcher`` is Lightning's."""
        ahead = list(getattr(fetcher, "batches", ()))
        states: list[dict[str, Any]] = []
        for position in self._positions:
            if isinstance(position, DataLoaderPosition):
                states.append(position.state(len(ahead)))
            else:
                states.append({} if position is None else position.state())
        saved: dict[str, Any] = {"loaders": states, "began": self._began, "ahead": []}
        if ahead and any(isinstance(p, StatefulLoaderPosition) for p in self._positions):
            # Fetched and not used; the loader's own state counts it as used.
            saved["ahead"] = ahead if is_plain_data(ahead) else None
        return saved

    def detach(self) -> None:
        """The user's loaders are as they were."""
        for position in self._positions:
            if position is not None:
                position.detach()
        self._positions, self._loaders = [], []

    # Going on.

    def resume(self, saved: dict[str, Any], batches: int, *, same_ranks: bool, over: bool) -> None:
        """Before the loaders are iterated: ``batches`` of this epoch were used, or all of them
        (``over``). Their samplers' epoch is set.

        After its last batch an epoch does not go on: what follows is a validation, or the next
        epoch.
        """
        states, self._replay, self._over = saved["loaders"], 0, over
        if len(states) != len(self._loaders):
            self.inexact.append("the training data has another number of loaders than before")
            return
        for loader, position, state in zip(self._loaders, self._positions, states, strict=True):
            if text := describe_inexact_loader(loader):
                self.inexact.append(text)
            if isinstance(position, StatefulLoaderPosition) and "state" in state:
                self._go_on_kept(loader, position, state, batches, same_ranks=same_ranks)
            elif isinstance(position, FfcvLoaderPosition) and "seed" in state:
                position.resume(state, batches if same_ranks and not over else 0)
                if batches and not (same_ranks or over):
                    self._go_on_anew(loader, saved, batches, same_ranks=False)
            elif over:
                continue
            elif isinstance(position, DataLoaderPosition) and "used" in state:
                self._go_on_following(loader, position, state)
            elif batches:
                self._go_on_anew(loader, saved, batches, same_ranks=same_ranks)
        self.used = list(self._batches_used())

    def begin(self, saved: dict[str, Any]) -> None:
        """Before the loaders are iterated for an epoch of which nothing was used."""
        for position, state in zip(self._positions, saved["loaders"], strict=False):
            if isinstance(position, FfcvLoaderPosition) and "seed" in state:
                position.resume(state, 0)

    def _batches_used(self) -> Iterator[tuple[int, int]]:
        for loader, position in zip(self._loaders, self._positions, strict=True):
            left = None if position is None else position.batches_left()
            if left is not None and left != float("inf"):
                yield len(loader), len(loader) - int(left)

    def _go_on_following(self, loader: Any, position: DataLoaderPosition, state: Any) -> None:
        if not position.resume(state):
            if not position.exact:
                self.inexact.append(
                    f"the order of {_name(loader)} can't be shared out anew: this epoch begins "
                    "again, so some samples come a second time"
                )
            return
        if loader.num_workers:
            self.inexact.append(
                "what the dataset draws at random within its workers, if anything "
                "(augmentation), is drawn anew until this epoch ends"
            )

    def _go_on_kept(
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
                f"{_name(loader)} keeps a position for the number of ranks that it had: it begins "
                f"again, so {batches} batches of this epoch come a second time"
            )

    def _go_on_anew(self, loader: Any, saved: Any, batches: int, *, same_ranks: bool) -> None:
        if same_ranks and saved.get("began") is not None and len(self._loaders) == 1:
            self._replay, self._began = batches, saved["began"]
            restore_random_states(saved["began"])
            return
        self.inexact.append(
            f"{_name(loader)} has no position that could be restored: it begins again, so the "
            f"first {batches} batches of this epoch come a second time"
        )

    def iterated(self, fetcher: Any, saved: dict[str, Any]) -> str | None:
        """The loaders' iterators are there. Returns what was done that takes time."""
        for number, loader in enumerate(self._loaders if self._over else ()):
            if isinstance(self._positions[number], StatefulLoaderPosition) and isinstance(
                loader, DataLoader
            ):
                exhaust_iterator(_iterator_of(fetcher, number))
        ahead = saved.get("ahead", [])
        if ahead is None:
            self.inexact.append("one batch that had been fetched ahead could not be kept")
        elif ahead and hasattr(fetcher, "batches") and not self._over:
            fetcher.batches[:0] = [tuple(item) for item in ahead]
            fetcher.done = False
        batches, self._replay = self._replay, 0
        if not batches:
            return None
        if text := BatchReplay(fetcher, batches).run():
            self.inexact.append(text)
        return (
            f"{_name(self._loaders[0])} has no position: the first {batches} batches of this epoch "
            "were read again and dropped"
        )

    def drawn(self) -> None:
        """Before the first batch: whether what was dropped is what had been used."""
        for position in self._positions:
            if isinstance(position, DataLoaderPosition) and not position.exact:
                self.inexact.append(
                    "a sampler draws another order than before, so in this epoch some samples "
                    "come a second time and others not at all"
                )

    def restore_generators(self, saved: dict[str, Any]) -> None:
        for position, state in zip(self._positions, saved["loaders"], strict=False):
            if position is not None and "generators" in state:
                position.restore_generators(state)


def _position(loader: Any, epoch: Callable[[], int]) -> _Position | None:
    if is_ffcv_loader(loader):
        return FfcvLoaderPosition(loader, epoch)
    if is_stateful_loader(loader):
        return StatefulLoaderPosition(loader)
    return DataLoaderPosition(loader) if can_track(loader) else None


def _iterator_of(fetcher: Any, number: int) -> Any:
    combined = fetcher.iterator
    combined = getattr(combined, "_iterator", combined)
    return combined.iterators[number]


def _name(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        return f"the DataLoader of {type(loader.dataset).__name__}"
    return f"the loader ({type(loader).__name__})"
