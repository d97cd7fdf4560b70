"""What a rank needs besides Lightning's checkpoint to go on exactly: random states, positions in
the data, what was gathered since the epoch began, and DDP's buckets.

Kept in a file of each rank beside the checkpoint (``publish.py``). Put back at these moments:

- as DDP wraps the model: the places of gradients in its buckets (``buckets.py``);
- where the loaders are ready and not yet iterated: every sampler's epoch (Lightning sets it after
  workers have begun to fetch by epoch 0's order), and where each loader goes on;
- before the first batch: the random states, because setting up has drawn from them since, and what
  was logged.

On another number of ranks, or in batches of another size, the rest of the epoch is dealt anew where
the loader allows it, and Lightning's count of batches is set to fit.

What can't be had is told in one note that says what is not exact.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ltui.training.rank.checkpoint_files import rank_file
from ltui.training.rank.resume.ddp_buckets import DdpBuckets
from ltui.training.rank.resume.epoch_metric_state import (
    logged,
    metric_states,
    restore_logged,
    restore_metrics,
)
from ltui.training.rank.resume.loader_positions import LoaderPositions
from ltui.training.rank.resume.loop_counters import BoundaryKind, TrainedWeightsCheck
from ltui.training.rank.resume.random_states import (
    States,
    read_random_states,
    restore_random_states,
)

VERSION = 2


class ExactState:
    """One Trainer's. ``tell(text)`` says what is not exact."""

    def __init__(self, trainer: Any, tell: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._tell = tell
        self._loaders = LoaderPositions(lambda: trainer.fit_loop.epoch_progress.current.processed)
        self._buckets = DdpBuckets(trainer)
        self._validation_began: tuple[States, dict[str, Any]] | None = None
        self._weights = TrainedWeightsCheck(trainer)
        self._given: dict[str, Any] | None = None
        self._inexact: list[str] = []
        self._follows = False
        self._goes_on = False
        self._loaded_when_ready = False
        self._forget: Callable[[], None] | None = None
        self._watch(trainer.fit_loop)

    def _watch(self, loop: Any) -> None:
        load, begin = loop._load_combined_loader_states, loop.on_advance_start
        validation, epoch_loop = loop.epoch_loop.val_loop, loop.epoch_loop
        validate, setup, run_epoch = validation.run, loop.setup_data, epoch_loop.on_run_start

        def setup_data() -> None:
            setup()
            # A module that asks how many steps there will be (for a learning rate's schedule) has
            # the loaders set up before the checkpoint's counters are loaded, and Lightning then
            # loads no position at all.
            early = _loaded(loop) and not self._loaded_when_ready
            if early and loop._combined_loader is not None:
                loaders_ready()
                iter(loop._data_fetcher)
            if self._goes_on:
                self._goes_on = False
                self._guarded(self._iterated)

        def loaders_ready() -> None:
            self._loaded_when_ready = _loaded(loop)
            if self._given is None or self._same_ranks:
                load()
            self._guarded(self._follow)

        def on_advance_start() -> None:
            if self._forget is not None:
                self._guarded(self._forget)
                self._forget = None
            if self._given is not None and self._follows:
                self._guarded(self._restore)
            begin()

        @functools.wraps(run_epoch)
        def on_run_start(*args: Any, **kwargs: Any) -> Any:
            # Lightning iterates the loaders anew, but for the first epoch, for which it has.
            # Lightning 2.5 asks for the second alone.
            resuming = getattr(loop, "is_resuming", False) or epoch_loop.restarting
            if self._trainer.current_epoch > 0 and not resuming:
                self._loaders.epoch_begins()
            return run_epoch(*args, **kwargs)

        @functools.wraps(validate)
        def run() -> Any:
            if not self._trainer.sanity_checking:
                self._guarded(self._note_validation)
            return validate()

        loop.setup_data = setup_data
        loop._load_combined_loader_states = loaders_ready
        loop.on_advance_start = on_advance_start
        epoch_loop.on_run_start = on_run_start
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

    def _note_validation(self) -> None:
        self._validation_began = (
            read_random_states(self._device),
            metric_states(self._trainer.lightning_module),
        )
        self._weights.note()

    def can_save(self, place: BoundaryKind) -> bool:
        """Whether the module's weights are those that are trained. A callback that swaps in an
        average for validation keeps them somewhere else."""
        return place is not BoundaryKind.VALIDATION or self._weights.are_in_place()

    def state(self, place: BoundaryKind) -> dict[str, Any]:
        """Of this rank, now; within a validation as it was when that began, because it begins
        again."""
        trainer = self._trainer
        loop = trainer.fit_loop
        # First, because it may be a collective and what follows may fail on one rank.
        buckets = self._buckets.layout()
        if place is BoundaryKind.VALIDATION and self._validation_began is not None:
            random, metrics = self._validation_began
        else:
            random = read_random_states(self._device)
            metrics = metric_states(trainer.lightning_module)
        return {
            "version": VERSION,
            "world_size": trainer.world_size,
            "batches": loop.epoch_loop.batch_progress.current.ready,
            "over": bool(loop.epoch_loop.batch_progress.is_last_batch),
            "random": random,
            "buckets": buckets,
            "logged": logged(trainer),
            "metrics": metrics,
            **self._loaders.states(loop._data_fetcher),
        }

    # Going on.

    def read(self, checkpoint: Path) -> None:
        """Take this rank's file beside ``checkpoint``, to be put back as training begins."""
        self._given, self._follows, self._inexact = None, False, []
        trainer = self._trainer
        ranks = len(list(checkpoint.parent.glob(f"{checkpoint.name}.rank-*")))
        if not ranks:
            self._inexact.append(
                f"{checkpoint.name} holds no random states and no position in the data"
            )
            self._say()
            return
        own = trainer.global_rank % ranks
        given = _load(rank_file(checkpoint, own))
        if given.get("version") != VERSION:
            self._inexact.append("it was saved by another version of ltui")
            self._say()
            return
        self._given = given
        if ranks != trainer.world_size:
            # All ranks deal the same order, that of rank 0.
            first = _load(rank_file(checkpoint, 0))
            for key in ("loaders", "batches", "over"):
                given[key] = first[key]
            given["logged"]["means"], given["metrics"] = {}, {}
        else:
            self._buckets.give(given.get("buckets"))

    @property
    def _same_ranks(self) -> bool:
        return self._given is not None and self._given["world_size"] == self._trainer.world_size

    def _follow(self) -> None:
        """The training loaders are there, and not yet iterated."""
        loop, given = self._trainer.fit_loop, self._given
        loaders = loop._combined_loader.flattened
        epoch = loop.epoch_progress.current.processed
        for loader in loaders if epoch else ():
            set_sampler_epoch(loader, epoch)
        self._loaders.follow(loaders)
        if given is not None and _loaded(loop) and not self._follows:
            self._follows = True
            if loop.restarting:
                self._goes_on = True
                same, over = self._same_ranks, given["over"]
                self._loaders.resume(given, given["batches"], same_ranks=same, over=over)
            else:
                self._loaders.begin(given)
        self._loaders.epoch_begins()

    def _iterated(self) -> None:
        began = time.monotonic()
        assert self._given is not None
        text = self._loaders.iterated(self._trainer.fit_loop._data_fetcher, self._given)
        if text:
            self._tell(f"{text[0].upper()}{text[1:]} in {time.monotonic() - began:.1f} s.")

    def _restore(self) -> None:
        """Before the first batch."""
        given, self._given = self._given, None
        assert given is not None
        trainer, loop = self._trainer, self._trainer.fit_loop
        restore_random_states(given["random"], self._device)
        self._loaders.restore_generators(given)
        self._loaders.drawn()
        epoch = loop.epoch_progress.current
        if epoch.ready == epoch.started == epoch.processed:
            # An epoch begins. Lightning would take the iterator made before the random states
            # were back; told that it is not resuming, it makes a new one. Where it counts steps it
            # would also go on in the epoch that is over.
            loop._resuming_from_checkpoint = loop._restarting = False
            loop.epoch_loop.restarting = False
            given["logged"]["means"] = {}
        else:
            self._count_batches(given)
        self._forget = restore_logged(trainer, given["logged"], over=given["over"])
        restore_metrics(trainer.lightning_module, given["metrics"])
        if given["world_size"] != trainer.world_size:
            self._inexact.insert(0, self._other_ranks(given))
        elif self._buckets.may_differ:
            self._inexact.append(
                f"DDP may add the gradients of {trainer.world_size} ranks in another order than"
                " before, which rounds them otherwise"
            )
        self._say()

    def _count_batches(self, given: dict[str, Any]) -> None:
        """Where the rest of the epoch was dealt anew, have Lightning count so that it ends with
        the epoch."""
        loop = self._trainer.fit_loop
        counts = loop.epoch_loop.batch_progress.current
        if loop.max_batches == float("inf"):
            return
        if given["over"]:
            ready = loop.max_batches
        else:
            used = self._loaders.used
            fitting = [batches for length, batches in used if length >= loop.max_batches]
            if not fitting:
                return
            ready = min(fitting[0], loop.max_batches)
        more = int(ready) - given["batches"]
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + more)

    def _other_ranks(self, given: dict[str, Any]) -> str:
        before, now = given["world_size"], self._trainer.world_size
        text = f"it was saved by {before} rank{'s' * (before != 1)} and goes on with {now}"
        if not given["over"] and self._trainer.fit_loop.restarting and not self._loaders.inexact:
            text += ", which share the rest of this epoch so that each sample comes once"
        return f"{text}; batches, random draws and means of this epoch are not those of {before}"

    def _say(self) -> None:
        found, self._loaders.inexact = self._inexact + self._loaders.inexact, []
        self._inexact = []
        if found:
            self._tell(f"Not exact from here: {'; '.join(dict.fromkeys(found))}.")

    def detach(self) -> None:
        """``fit`` ended: the user's loaders are as they were."""
        self._loaders.detach()


def _load(path: Path) -> dict[str, Any]:
    given: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return given


def _loaded(loop: Any) -> bool:
    return bool(getattr(loop, "_loaded_from_state_dict", loop.restarting))


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Where Lightning sets it too, only later."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
