# ruff: noqa: ARG002  (the arguments are Lightning's)
"""What makes people's runs freeze, seen as a run begins and told with the remedy.

A callback beside the one that tells of training. Each look is taken once; then its hook becomes
None, which Lightning passes over, so that a step costs nothing for it. No collective: what takes
all ranks (different batch counts) is seen by whoever reads their queues.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ltui.training.rank.log_call_check import FreezeWarning, find_log_call_warnings

WORKERS_PER_CORE = 2
"""More loader workers than this for each core slow each other down."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (not a file of ours: where workers hand batches over)
_MOST_PARTS = 1000

Tell = Callable[[FreezeWarning], None]


class FreezeWarningHooks:
    """Mixed with Lightning's ``Callback``. Nothing here ever raises into training."""

    # Lightning asks ``callable(hook)`` and passes over what isn't: cheaper than an empty call.
    on_before_zero_grad = on_before_backward = on_after_backward = None
    on_before_optimizer_step = None

    def __init__(self, tell: Tell) -> None:
        self._tell_it = tell
        self._told: set[FreezeWarning] = set()

    def _look(self, look: Callable[[], Iterator[FreezeWarning]]) -> None:
        try:
            for caution in look():
                if caution not in self._told:
                    self._told.add(caution)
                    self._tell_it(caution)
        except Exception:  # noqa: BLE001, S110  (a caution is not worth a word of its own failure)
            pass

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.world_size > 1 and trainer.global_rank == 0:
            self._look(lambda: iter(find_log_call_warnings(type(pl_module))))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.local_rank == 0:
            self._look(lambda: _too_many_workers(trainer))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.local_rank == 0:
            self._look(lambda: _too_little_shared_memory(trainer, batch))
        self.on_train_batch_start = None  # type: ignore[assignment,method-assign]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if trainer.global_rank == 0:
            self._look(lambda: _guessed_batch_size(trainer, batch, "training"))
            self._look(lambda: _halfway_synchronised(trainer))
        self.on_train_batch_end = None  # type: ignore[assignment,method-assign]

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *index: Any
    ) -> None:
        if trainer.global_rank == 0:
            self._look(lambda: _guessed_batch_size(trainer, batch, "validation"))
        self.on_validation_batch_end = None  # type: ignore[assignment,method-assign]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size > 1 and trainer.global_rank == 0:
            self._look(lambda: _not_synchronised(trainer))
            self._look(lambda: _halfway_synchronised(trainer))
        self.on_validation_end = None  # type: ignore[assignment,method-assign]


def _local_ranks() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1


def _worker_loaders(trainer: Any) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    return [x for x in loaders if isinstance(getattr(x, "num_workers", None), int)]


def _too_many_workers(trainer: Any) -> Iterator[FreezeWarning]:
    cores, ranks = len(os.sched_getaffinity(0)), max(_local_ranks(), trainer.num_devices)
    workers = sum(loader.num_workers for loader in _worker_loaders(trainer))
    if workers * ranks > WORKERS_PER_CORE * cores:
        yield FreezeWarning(
            f"{ranks} ranks with {workers} loader workers each are {workers * ranks} processes "
            f"for {cores} cores: they slow each other down, and starting them takes long.",
            f"Set num_workers to about {max(1, cores // ranks)}.",
        )


def _too_little_shared_memory(trainer: Any, batch: Any) -> Iterator[FreezeWarning]:
    loaders = [loader for loader in _worker_loaders(trainer) if loader.num_workers]
    if not loaders or not os.path.isdir(_SHARED_MEMORY):
        return
    there = os.statvfs(_SHARED_MEMORY)
    ahead = sum(x.num_workers * (x.prefetch_factor or 2) for x in loaders) / len(loaders)
    ranks = max(_local_ranks(), trainer.num_devices)
    yield from shared_memory_warnings(
        sum(t.nbytes for t in _tensors(batch)), int(ahead), ranks, there.f_frsize * there.f_blocks
    )


def shared_memory_warnings(
    batch_bytes: int, batches_ahead: int, ranks: int, there_bytes: int
) -> Iterator[FreezeWarning]:
    """``batches_ahead``: that the workers of a rank hold ready."""
    needed = batch_bytes * batches_ahead * ranks
    if needed > there_bytes:
        yield FreezeWarning(
            f"Loader workers hold up to {needed >> 20} MiB of batches ready in {_SHARED_MEMORY}, "
            f"which has {there_bytes >> 20} MiB: a worker will be killed by a bus error.",
            "Make it larger (docker run --shm-size or --ipc=host), or lower num_workers or "
            "prefetch_factor.",
        )


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Found like Lightning does it, up to ``_MOST_PARTS``."""
    found: list[torch.Tensor] = []
    parts = [batch]
    for _ in range(_MOST_PARTS):
        if not parts:
            break
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    return found


def _guessed_batch_size(trainer: Any, batch: Any, where: str) -> Iterator[FreezeWarning]:
    """Lightning takes the first tensor's length as the weight of an epoch's mean."""
    results = trainer._results
    if results is None or results.batch_size is None:
        return
    sizes = sorted({t.shape[0] if t.ndim else 1 for t in _tensors(batch)})
    if len(sizes) > 1:
        names = sorted({m.meta.name for m in results.values() if m.is_tensor and m.meta.on_epoch})
        yield FreezeWarning(
            f"Lightning guesses the batch size in {where}: the batch holds tensors of length "
            f"{', '.join(str(s) for s in sizes[:4])}, and the mean of {_some(names)} over an epoch "
            f"is weighted with {results.batch_size}.",
            "Say it: self.log(..., batch_size=...).",
        )


def _not_synchronised(trainer: Any) -> Iterator[FreezeWarning]:
    results = trainer._results
    names = sorted(
        {
            m.meta.name
            for m in (results.values() if results is not None else ())
            if m.is_tensor and m.meta.on_epoch and not m.meta.sync._should
        }
    )
    if names:
        yield FreezeWarning(
            f"{_some(names)} {'is' if len(names) == 1 else 'are'} logged in validation without "
            "sync_dist=True: each rank has a value of its own, and what decides by it (early "
            "stopping, the best checkpoint, a schedule) may do so differently on each, which "
            "freezes the run.",
            "Log it with sync_dist=True, or log a torchmetrics metric object.",
        )


def _halfway_synchronised(trainer: Any) -> Iterator[FreezeWarning]:
    results = trainer._results
    for metric in results.values() if results is not None else ():
        sync = metric.meta.sync
        if sync._should and sync.rank_zero_only:
            yield FreezeWarning(
                f"{metric.meta.name} is logged with both sync_dist=True and rank_zero_only=True: "
                "it is not synchronised.",
                "Drop rank_zero_only=True: Lightning writes it once anyway.",
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
