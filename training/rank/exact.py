"""What a rank needs besides Lightning's checkpoint to go on exactly: random states and positions.

Kept in a file of each rank beside the checkpoint (``checkpoint.py``). Put back at these moments:

- where the loaders are ready and not yet iterated: every sampler's epoch (Lightning sets it after
  workers have begun to fetch by epoch 0's order), and which batches each loader drops;
- before the first batch: the random states, because setting up has drawn from them since.

What can't be had is told in one note that says what is not exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ltui.training.rank.loops import Place
from ltui.training.rank.position import LoaderPosition, can_follow, keeps_position
from ltui.training.rank.publish import rank_file
from ltui.training.rank.randomness import States, random_states, restore_random_states

VERSION = 1


class ExactState:
    """One Trainer's. ``tell(text)`` says what is not exact."""

    def __init__(self, trainer: Any, tell: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._tell = tell
        self._positions: list[LoaderPosition | None] = []
        self._validation_began: States | None = None
        self._given: dict[str, Any] | None = None
        self._loader_states: list[dict[str, Any]] | None = None
        self._inexact: list[str] = []
        self._loaded_when_ready = False
        self._watch(trainer.fit_loop)

    def _watch(self, loop: Any) -> None:
        load, begin = loop._load_combined_loader_states, loop.on_advance_start
        validation = loop.epoch_loop.val_loop
        validate = validation.run

        setup = loop.setup_data

        def setup_data() -> None:
            setup()
            # A module that asks how many steps there will be (for a learning rate's schedule) has
            # the loaders set up before the checkpoint's counters are loaded, and Lightning then
            # loads no position at all.
            early = _loaded(loop) and not self._loaded_when_ready
            if early and loop._combined_loader is not None:
                loaders_ready()
                iter(loop._data_fetcher)

        def loaders_ready() -> None:
            self._loaded_when_ready = _loaded(loop)
            load()
            self._guarded(self._follow)

        def on_advance_start() -> None:
            if self._given is not None:
                self._guarded(self._restore)
            begin()

        @functools.wraps(validate)
        def run() -> Any:
            if not self._trainer.sanity_checking:
                self._validation_began = random_states(self._device)
            return validate()

        loop.setup_data = setup_data
        loop._load_combined_loader_states = loaders_ready
        loop.on_advance_start = on_advance_start
        validation.run = run

    def _guarded(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001  (training matters more than exactness)
            self._tell(f"Resuming may not be exact: {type(error).__name__}: {error}")

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._trainer.strategy.root_device
        return device

    # Saving.

    def state(self, place: Place) -> dict[str, Any]:
        """Of this rank, now; within a validation the random states of its beginning, because it
        begins again."""
        loop = self._trainer.fit_loop
        ahead = len(getattr(loop._data_fetcher, "batches", ()))
        within = place is Place.VALIDATION and self._validation_began is not None
        return {
            "version": VERSION,
            "world_size": self._trainer.world_size,
            "batches": loop.epoch_loop.batch_progress.current.ready,
            "random": self._validation_began if within else random_states(self._device),
            "loaders": [{} if p is None else p.state(ahead) for p in self._positions],
        }

    # Going on.

    def read(self, checkpoint: Path) -> None:
        """Take this rank's file beside ``checkpoint``, to be put back as training begins."""
        self._given, self._loader_states, self._inexact = None, None, []
        path = rank_file(checkpoint, self._trainer.global_rank)
        ranks = len(list(checkpoint.parent.glob(f"{checkpoint.name}.rank-*")))
        if not ranks:
            self._inexact.append(
                f"{checkpoint.name} holds no random states and no position in the data"
            )
        elif ranks != self._trainer.world_size:
            self._inexact.append(
                f"it was saved by {ranks} ranks and goes on with {self._trainer.world_size}, so "
                "random states and the position in the data begin anew"
            )
        else:
            self._given = torch.load(path, map_location="cpu", weights_only=True)
            self._loader_states = self._given["loaders"]
        if self._inexact:
            self._say()

    def _follow(self) -> None:
        """The training loaders are there, and not yet iterated."""
        for position in self._positions:
            if position is not None:
                position.let_go()
        loop = self._trainer.fit_loop
        loaders = loop._combined_loader.flattened
        epoch = loop.epoch_progress.current.processed
        for loader in loaders if epoch else ():
            set_sampler_epoch(loader, epoch)
        self._positions = [LoaderPosition(x) if can_follow(x) else None for x in loaders]
        states = self._loader_states
        if states is None or not loop.restarting:
            return
        self._loader_states = None
        if len(states) != len(loaders):
            self._inexact.append("the training data has another number of loaders than before")
            return
        # After its last batch an epoch does not go on: what follows is a validation, or the next
        # epoch. A loader that is shorter than others is read again within an epoch.
        ended = all(p is None or p.ended(s) for p, s in zip(self._positions, states, strict=True))
        for loader, position, state in zip(loaders, self._positions, states, strict=True):
            self._go_on(loader, position, {} if ended and position is not None else state)

    def _go_on(self, loader: Any, position: LoaderPosition | None, state: dict[str, Any]) -> None:
        batches = self._given["batches"] if self._given is not None else 0
        if position is not None and "used" in state:
            if position.go_on(state) and loader.num_workers:
                self._inexact.append(
                    "what the dataset draws at random within its workers, if anything "
                    "(augmentation), is drawn anew until this epoch ends"
                )
        elif position is None and not keeps_position(loader) and batches:
            self._inexact.append(
                f"{_name(loader)} has no position that could be restored: it begins again, so the "
                f"first {batches} batches of this epoch come a second time"
            )

    def _restore(self) -> None:
        """Before the first batch."""
        given, self._given = self._given, None
        assert given is not None
        restore_random_states(given["random"], self._device)
        loop = self._trainer.fit_loop
        for position, state in zip(self._positions, given["loaders"], strict=False):
            if position is not None and "used" in state:
                position.restore_generators(state)
                if not position.exact:
                    self._inexact.append(
                        "a sampler draws another order than before, so in this epoch some samples "
                        "come a second time and others not at all"
                    )
        if not loop.restarting:
            # An epoch begins. Lightning would take the iterator made before the random states
            # were back; told that it is not resuming, it makes a new one.
            loop._resuming_from_checkpoint = False
        self._say()

    def _say(self) -> None:
        if self._inexact:
            self._tell(f"Not exact from here: {'; '.join(dict.fromkeys(self._inexact))}.")
        self._inexact = []

    def let_go(self) -> None:
        """``fit`` ended: the user's loaders are as they were."""
        for position in self._positions:
            if position is not None:
                position.let_go()
        self._positions = []


def _loaded(loop: Any) -> bool:
    return bool(getattr(loop, "_loaded_from_state_dict", loop.restarting))


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Where Lightning sets it too, only later."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


def _name(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        return f"the DataLoader of {type(loader.dataset).__name__}"
    return f"the loader ({type(loader).__name__})"
