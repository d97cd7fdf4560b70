"""The state that a rank needs in addition to Lightning's checkpoint for an exact resume.

This state consists of random states, positions in the data, the metrics accumulated since the epoch
began, and DDP's buckets. Each rank saves it in a file next to the checkpoint
(``checkpoint_files.py``). It is restored at these times:

- When DDP wraps the model: the bucket layout (``ddp_buckets.py``).
- When the loaders exist and are not yet iterated: every sampler's epoch and the position of each
  loader. Lightning sets the epoch later, when workers have already fetched in the order of epoch 0.
- Before the first batch: the random states, because the setup has drawn from them, and the metrics.

With another number of ranks or another batch size, the rest of the epoch is resharded where the
loader allows it, and Lightning's count of batches is adjusted.

One note says what could not be restored exactly.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ltui.training.rank import lightning_internals, torch_internals
from ltui.training.rank.channel import Channel
from ltui.training.rank.resume.ddp_buckets import DdpBuckets
from ltui.training.rank.resume.loader_positions import LoaderPositions
from ltui.training.rank.resume.loop_state import (
    BoundaryKind,
    TrainedWeightsCheck,
    checkpoint_saves,
    logged_state,
    metric_states,
    restore_checkpoint_saves,
    restore_logged,
    restore_metrics,
)
from ltui.training.rank.resume.plain_data import (
    States,
    load_plain_data,
    read_random_states,
    restore_random_states,
)
from ltui.training.rank.training_facts import lightning_version
from ltui.training.shared.checkpoint_files import rank_file

VERSION = 2
"""Version of a rank's state file. A file of another version is not used."""
_NO_STATE = 0
"""In place of the version if the state could not be read when the checkpoint was saved."""


def create_exact_state(trainer: Any, channel: Channel) -> ExactState | None:
    """Return the exact state of ``trainer``.

    If the installed Lightning or torch has not the attributes that it needs, send a warning and
    return None. The run then trains without it and resumes from Lightning's own checkpoint.
    """
    try:
        lightning_internals.require_exact_resume(trainer)
        torch_internals.require_exact_resume()
        return ExactState(
            trainer,
            functools.partial(channel.event_from_rank_0, "note"),
            functools.partial(channel.event, "note"),
        )
    except Exception as error:  # noqa: BLE001  (training matters more than exactness)
        versions = f"Lightning {lightning_version(trainer)} and torch {torch.__version__}"
        channel.warn_from_rank_0(
            f"Resuming will not be exact: ltui was not tested with {versions} ({error}). A resume "
            "continues from Lightning's own checkpoint, without random states and the position in "
            "the data.",
            "Upgrade ltui, or install the versions of Lightning and torch that it supports.",
        )
        return None


class ExactState:
    """Saves and restores the exact state of one Trainer.

    ``report(text)`` is called with what is not exact on all ranks, and ``report_own(text)`` with
    what may be so on this rank alone.
    """

    def __init__(
        self, trainer: Any, report: Callable[[str], None], report_own: Callable[[str], None]
    ) -> None:
        self._trainer = trainer
        self._report, self._report_own = report, report_own
        self._loaders = LoaderPositions(lambda: trainer.fit_loop.epoch_progress.current.processed)
        self._inexact = self._loaders.inexact
        """The parts that are not exact, as middles of sentences, until they are reported."""
        self._buckets = DdpBuckets(trainer)
        self._before_validation: tuple[States, dict[str, Any]] | None = None
        """Random states and metric states from when the last validation began."""
        self._weights = TrainedWeightsCheck(trainer)
        self._saved: dict[str, Any] | None = None
        """The loaded state, until all of it is restored."""
        self._positions_restored = False
        """True if the loaders were prepared for the loaded state."""
        self._epoch_resumes = False
        """True from the preparation of a resumed epoch until its iterators exist."""
        self._loaded_when_ready = False
        """True if Lightning had loaded its counters when the loaders were last set up."""
        self._forget_results: Callable[[], None] | None = None
        """To be called when the next epoch begins."""
        self.after_restore: Callable[[], None] = lambda: None
        """Called when the random states and the metrics of a checkpoint have been restored."""
        self._wrap_loop_methods(trainer.fit_loop)

    def _wrap_loop_methods(self, loop: Any) -> None:
        """Wrap the methods of Lightning's loops that run when a part must be restored or saved."""
        setup_loaders, begin_epoch = loop.setup_data, loop.on_advance_start
        validation, epoch_loop = loop.epoch_loop.val_loop, loop.epoch_loop
        validate, run_epoch = validation.run, epoch_loop.on_run_start

        def setup_data() -> None:
            setup_loaders()
            # A module that asks for the number of steps (for a learning rate schedule) has the
            # loaders set up before the checkpoint's counters are loaded. Lightning then loads no
            # position at all.
            early = lightning_internals.is_state_loaded(loop) and not self._loaded_when_ready
            if early and lightning_internals.combined_loader(loop) is not None:
                loaders_ready()
                iter(lightning_internals.data_fetcher(loop))
            if self._epoch_resumes:
                self._epoch_resumes = False
                self._guarded(self._after_iterators_created)

        def loaders_ready() -> None:
            self._loaded_when_ready = lightning_internals.is_state_loaded(loop)
            if self._saved is None or self._same_ranks:
                load_states()
            self._guarded(self._track_loaders)

        def on_advance_start() -> None:
            if self._forget_results is not None:
                self._guarded(self._forget_results)
                self._forget_results = None
            if self._saved is not None and self._positions_restored:
                self._guarded(self._restore)
            begin_epoch()

        @functools.wraps(run_epoch)
        def on_run_start(*args: Any, **kwargs: Any) -> Any:
            # Lightning iterates the loaders again here, except for the first epoch and a resumed
            # epoch, for which it already has.
            if self._trainer.current_epoch > 0 and not lightning_internals.is_resuming(loop):
                self._loaders.epoch_begins()
            return run_epoch(*args, **kwargs)

        @functools.wraps(validate)
        def run() -> Any:
            if not self._trainer.sanity_checking:
                self._guarded(self._record_before_validation)
            return validate()

        load_states = lightning_internals.replace_load_loader_states(loop, loaders_ready)
        loop.setup_data = setup_data
        loop.on_advance_start = on_advance_start
        epoch_loop.on_run_start = on_run_start
        validation.run = run

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run ``action`` and report its failure."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  (training matters more than exactness)
            self._report(f"Resuming may not be exact: {type(error).__name__}: {error}")

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._trainer.strategy.root_device
        return device

    # Saving.

    def _record_before_validation(self) -> None:
        self._before_validation = (
            read_random_states(self._device),
            metric_states(self._trainer.lightning_module),
        )
        self._weights.record()

    def can_save(self, boundary: BoundaryKind) -> bool:
        """Return True if the module contains the weights that are trained.

        A callback that swaps in an average for validation keeps them elsewhere.
        """
        return boundary is not BoundaryKind.VALIDATION or self._weights.are_in_place()

    def state(self, boundary: BoundaryKind) -> dict[str, Any]:
        """Return this rank's state.

        During validation, return the state from before validation began, because validation
        restarts on resume.
        """
        try:
            return self._read_state(boundary)
        except Exception as error:  # noqa: BLE001  (the checkpoint is saved in any case)
            self._report_own(
                f"A resume from this checkpoint will not be exact: {type(error).__name__}: {error}"
            )
            return {"version": _NO_STATE}

    def _read_state(self, boundary: BoundaryKind) -> dict[str, Any]:
        trainer = self._trainer
        loop = trainer.fit_loop
        # First, because it may be a collective and the rest may fail on one rank.
        buckets = self._buckets.layout()
        if boundary is BoundaryKind.VALIDATION and self._before_validation is not None:
            random, metrics = self._before_validation
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
            "logged": logged_state(trainer),
            "metrics": metrics,
            "saves": checkpoint_saves(trainer),
            **self._loaders.states(lightning_internals.data_fetcher(loop)),
        }

    # Resuming.

    def load(self, checkpoint: Path) -> None:
        """Load this rank's file next to ``checkpoint``. It is restored when training begins."""
        self._saved, self._positions_restored = None, False
        self._inexact.clear()
        trainer = self._trainer
        ranks = len(list(checkpoint.parent.glob(f"{checkpoint.name}.rank-*")))
        # The files of all ranks, because all ranks must restore their states or none.
        files = [rank_file(checkpoint, rank) for rank in range(ranks)]
        versions = {load_plain_data(file, mmap=True).get("version") for file in files}
        if versions != {VERSION}:
            reason = "it was saved by another version of ltui"
            if not ranks:
                reason = f"{checkpoint.name} contains no random states and no position in the data"
            elif _NO_STATE in versions:
                reason = "its exact state could not be read when it was saved"
            self._inexact.append(reason)
            self._report_inexact()
            return
        saved = self._saved = load_plain_data(files[trainer.global_rank % ranks])
        if ranks != trainer.world_size:
            # All ranks must reshard the same order, so they use that of rank 0.
            first = load_plain_data(files[0])
            for key in ("loaders", "batches", "over"):
                saved[key] = first[key]
            saved["logged"]["means"], saved["metrics"] = {}, {}
        else:
            self._buckets.apply_on_wrap(saved.get("buckets"))

    @property
    def _same_ranks(self) -> bool:
        return self._saved is not None and self._saved["world_size"] == self._trainer.world_size

    def _track_loaders(self) -> None:
        """Track the training loaders, and make them resume if a state was loaded.

        Called when the loaders exist and before they are iterated.
        """
        loop, saved = self._trainer.fit_loop, self._saved
        loaders = lightning_internals.combined_loader(loop).flattened
        epoch = loop.epoch_progress.current.processed
        for loader in loaders if epoch else ():
            set_sampler_epoch(loader, epoch)
        self._loaders.track(loaders)
        loaded = lightning_internals.is_state_loaded(loop)
        if saved is not None and loaded and not self._positions_restored:
            self._positions_restored = True
            if loop.restarting:
                self._epoch_resumes = True
                same, over = self._same_ranks, saved["over"]
                self._loaders.resume(saved, saved["batches"], same_ranks=same, over=over)
            else:
                self._loaders.resume_at_epoch_start(saved)
        self._loaders.epoch_begins()

    def _after_iterators_created(self) -> None:
        began = time.monotonic()
        assert self._saved is not None
        fetcher = lightning_internals.data_fetcher(self._trainer.fit_loop)
        text = self._loaders.after_iterators_created(fetcher, self._saved)
        if text:
            self._report(f"{text[0].upper()}{text[1:]} in {time.monotonic() - began:.1f} s.")

    def _restore(self) -> None:
        """Restore the random states and the metrics. Called before the first batch."""
        saved, self._saved = self._saved, None
        assert saved is not None
        trainer, loop = self._trainer, self._trainer.fit_loop
        restore_random_states(saved["random"], self._device)
        self._loaders.restore_generators(saved)
        self._loaders.check_dropped_indices()
        epoch = loop.epoch_progress.current
        if epoch.ready == epoch.started == epoch.processed:
            # A new epoch begins. Lightning would use the iterator that was created before the
            # random states were restored, and with a limit of steps it would continue the finished
            # epoch. If it is not resuming, it creates a new iterator.
            lightning_internals.clear_resuming(loop)
            saved["logged"]["means"] = {}
        else:
            self._adjust_batch_count(saved)
        self._forget_results = restore_logged(trainer, saved["logged"], over=saved["over"])
        restore_metrics(trainer.lightning_module, saved["metrics"])
        restore_checkpoint_saves(trainer, saved.get("saves", {}))  # of an older ltui there are none
        self.after_restore()
        if saved["world_size"] != trainer.world_size:
            self._inexact.insert(0, self._describe_other_ranks(saved))
        elif self._buckets.may_differ:
            self._inexact.append(
                f"DDP may add the gradients of {trainer.world_size} ranks in another order than"
                " before, which rounds them differently"
            )
        self._report_inexact()

    def _adjust_batch_count(self, saved: dict[str, Any]) -> None:
        """Make Lightning's count of batches reach its maximum when the resharded epoch ends."""
        loop = self._trainer.fit_loop
        counts = loop.epoch_loop.batch_progress.current
        if loop.max_batches == float("inf"):
            return
        if saved["over"]:
            ready = loop.max_batches
        else:
            used = self._loaders.used
            fitting = [batches for length, batches in used if length >= loop.max_batches]
            if not fitting:
                return
            ready = min(fitting[0], loop.max_batches)
        more = int(ready) - saved["batches"]
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + more)

    def _describe_other_ranks(self, saved: dict[str, Any]) -> str:
        """Return what changed with the number of ranks, as the middle of a sentence."""
        before, now = saved["world_size"], self._trainer.world_size
        text = f"it was saved by {before} rank{'s' * (before != 1)} and continues with {now}"
        if not saved["over"] and self._trainer.fit_loop.restarting and not self._inexact:
            text += ", which share the rest of this epoch so that each sample is used once"
        return f"{text}; batches, random draws and means of this epoch are not those of {before}"

    def _report_inexact(self) -> None:
        """Report what is not exact, in one sentence, and clear the list."""
        if self._inexact:
            self._report(f"Not exact from here: {'; '.join(dict.fromkeys(self._inexact))}.")
        self._inexact.clear()

    def detach(self) -> None:
        """Give the user's loaders their own methods back when ``fit`` ends."""
        self._loaders.detach()


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on the loader's samplers. Lightning does the same, but too late here."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
