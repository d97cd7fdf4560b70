"""Warnings with a remedy: what a configuration or the ranks' own words say before a run freezes.

Ranks tell what only they can see as events of the kind ``warning``; what takes the words of several
ranks is found here. Pure: what the machine has is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ltui.training.state.run_snapshot import FreezeWarning

if TYPE_CHECKING:
    from ltui.training.state.record_fold import FoldedEvent, FoldState

MAX_WARNINGS = 20
WORKERS_PER_CORE = 2
"""More loader workers than this for each core slow each other down."""
SHARED_BYTES_PER_WORKER = 64 << 20
"""What a worker may hold ready of batches of images; a container has 64 MiB for all by default."""
_WORKER_KEYS = ("num_workers", "workers")


def add_warnings(
    known: tuple[FreezeWarning, ...], events: Sequence[FoldedEvent]
) -> tuple[FreezeWarning, ...]:
    """``known`` and what ``events`` warn of, each once, at most ``MAX_WARNINGS``."""
    for event in events:
        if event.kind != "warning":
            continue
        remedy = event.fields.get("remedy")
        caution = FreezeWarning(what=event.text, remedy=str(remedy) if remedy else None)
        if caution not in known and len(known) < MAX_WARNINGS:
            known = (*known, caution)
    return known


def all_warnings(fold: FoldState) -> tuple[FreezeWarning, ...]:
    """All that is to be told of an attempt so far."""
    uneven = uneven_batches({r: rank.plan for r, rank in fold.ranks.items() if rank.plan})
    return fold.warnings if uneven is None else (uneven, *fold.warnings)


def uneven_batches(plans: Mapping[int, Mapping[str, Any]]) -> FreezeWarning | None:
    """Ranks that will train on different numbers of batches: the one with more waits for ever."""
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
    """(dotted path, caution) of a resolved configuration, before anything is started.

    ``ranks``: of this machine. None where it is not known what there is.
    """
    found = []
    for path, workers in _worker_counts(document):
        all_workers = workers * ranks
        if cores is not None and all_workers > WORKERS_PER_CORE * cores:
            what = (
                f"{ranks} ranks with {workers} loader workers each start {all_workers} processes "
                f"on {cores} cores, which slow each other down."
            )
            remedy = f"Set it to about {max(1, cores // ranks)}."
            found.append((path, FreezeWarning(what=what, remedy=remedy)))
        needed = all_workers * SHARED_BYTES_PER_WORKER
        if shared_memory_bytes is not None and workers and shared_memory_bytes < needed:
            what = (
                f"{all_workers} loader workers pass batches through /dev/shm, which has "
                f"{shared_memory_bytes >> 20} MiB: with large batches, workers die of a bus error."
            )
            remedy = "Make it larger (docker run --shm-size or --ipc=host), or use fewer workers."
            found.append((path, FreezeWarning(what=what, remedy=remedy)))
    return found


def _worker_counts(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    data = document.get("data")
    arguments = data.get("init_args") if isinstance(data, Mapping) else None
    if not isinstance(arguments, Mapping) or arguments.get("loader") == "ffcv":
        return []  # FFCV's workers are threads, and share nothing
    return [
        (f"data.init_args.{key}", arguments[key])
        for key in _WORKER_KEYS
        if type(arguments.get(key)) is int
    ]
