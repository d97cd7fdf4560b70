"""Warnings with a remedy about setups that often freeze a run, given before the run freezes.

A rank reports what only it can see as events of the kind ``warning``. This module collects these
events and adds the checks that compare several ranks or need only the configuration. Pure: the
resources of the machine are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ltui.training.state.run_snapshot import FreezeWarning

if TYPE_CHECKING:
    from ltui.training.state.record_fold import FoldedEvent, FoldState

MAX_WARNINGS = 20
"""Maximum number of warnings that ranks may add to a run."""
WORKERS_PER_CORE = 2
"""Number of DataLoader workers per processor core above which they slow each other down."""
SHARED_BYTES_PER_WORKER = 64 << 20
"""Shared memory that one worker may need for prefetched batches of images.

A container has 64 MiB for all its processes by default.
"""
_WORKER_KEYS = ("num_workers", "workers")


def add_warnings(
    warnings: tuple[FreezeWarning, ...], events: Sequence[FoldedEvent]
) -> tuple[FreezeWarning, ...]:
    """Return ``warnings`` and those of ``events``, each once, at most ``MAX_WARNINGS``."""
    for event in events:
        if event.kind != "warning":
            continue
        remedy = event.fields.get("remedy")
        warning = FreezeWarning(what=event.text, remedy=str(remedy) if remedy else None)
        if warning not in warnings and len(warnings) < MAX_WARNINGS:
            warnings = (*warnings, warning)
    return warnings


def all_warnings(fold: FoldState) -> tuple[FreezeWarning, ...]:
    """Return all warnings about an attempt so far."""
    uneven = uneven_batches({r: rank.plan for r, rank in fold.ranks.items() if rank.plan})
    return fold.warnings if uneven is None else (uneven, *fold.warnings)


def uneven_batches(plans: Mapping[int, Mapping[str, Any]]) -> FreezeWarning | None:
    """Return a warning if ranks have different numbers of batches; None otherwise.

    A rank with more batches waits forever for the others.
    """
    counts = {
        rank: plan["batches_per_epoch"]
        for rank, plan in plans.items()
        if isinstance(plan.get("batches_per_epoch"), int)
    }
    if len(set(counts.values())) < 2:
        return None
    fewest, most = min(counts, key=lambda r: (counts[r], r)), max(counts, key=lambda r: counts[r])
    return FreezeWarning(
        what=(
            f"Ranks have different batch counts: rank {fewest} {counts[fewest]}, rank {most} "
            f"{counts[most]} per epoch. When one rank runs out of batches, the others wait forever."
        ),
        remedy=(
            "Give every rank the same number of batches: DistributedSampler, drop_last=True, or "
            "trainer.limit_train_batches."
        ),
    )


def precheck(
    document: Mapping[str, Any],
    *,
    ranks: int,
    cores: int | None,
    shared_memory_bytes: int | None,
) -> list[tuple[str, FreezeWarning]]:
    """Check a resolved configuration before a run starts; return (dotted path, warning) pairs.

    ``ranks`` counts the ranks on this machine. ``cores`` and ``shared_memory_bytes`` are None if
    they are unknown; then nothing is checked against them.
    """
    warnings = []
    for path, workers in _worker_counts(document):
        all_workers = workers * ranks
        if cores is not None and all_workers > WORKERS_PER_CORE * cores:
            text = (
                f"{ranks} ranks with {workers} loader workers each start {all_workers} processes "
                f"on {cores} cores, which slow each other down."
            )
            remedy = f"Set it to about {max(1, cores // ranks)}."
            warnings.append((path, FreezeWarning(what=text, remedy=remedy)))
        needed = all_workers * SHARED_BYTES_PER_WORKER
        if shared_memory_bytes is not None and workers and shared_memory_bytes < needed:
            text = (
                f"{all_workers} loader workers pass batches through /dev/shm, which has "
                f"{shared_memory_bytes >> 20} MiB: with large batches, workers die of a bus error."
            )
            remedy = "Make it larger (docker run --shm-size or --ipc=host), or use fewer workers."
            warnings.append((path, FreezeWarning(what=text, remedy=remedy)))
    return warnings


def _worker_counts(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    data = document.get("data")
    arguments = data.get("init_args") if isinstance(data, Mapping) else None
    if not isinstance(arguments, Mapping) or arguments.get("loader") == "ffcv":
        return []  # FFCV's workers are threads and need no shared memory.
    return [
        (f"data.init_args.{key}", arguments[key])
        for key in _WORKER_KEYS
        if type(arguments.get(key)) is int
    ]
