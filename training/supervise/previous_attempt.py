"""Read what the store holds about earlier attempts, to continue or resume the run from there."""

from __future__ import annotations

import sqlite3

from msgspec.structs import replace

from ltui.training.lifecycle.start_supervisor import AttemptPlan
from ltui.training.problem import ProblemError
from ltui.training.state.record_fold import FoldState, RankFold
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.state.snapshot_from_fold import Progress
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from ltui.training.store.stored_values import StoredValues


def stored_snapshot(run_dir: RunDir) -> RunSnapshot | None:
    """Return the snapshot that an earlier supervisor stored, or None if it cannot be read."""
    try:
        with RunStore(run_dir) as store:
            return store.snapshot()
    except ProblemError:
        return None


def starting_progress(plan: AttemptPlan, before: RunSnapshot | None) -> Progress | None:
    """Return where a resumed attempt starts, and the length of the run as far as it is known.

    ``before`` is the last snapshot of the previous attempt. Its length is not used if overrides
    (``--set``) were added, because they may have changed the length of the run.
    """
    if plan.resume_step is None:
        return None
    if before is None:
        return Progress(global_step=plan.resume_step)
    epochs = [c.epoch for c in before.checkpoints if c.global_step == plan.resume_step]
    same_length = not plan.changes
    return Progress(
        global_step=plan.resume_step,
        epoch=epochs[-1] if epochs else None,
        max_steps=before.max_steps if same_length else None,
        max_epochs=before.max_epochs if same_length else None,
        batches_per_epoch=before.batches_per_epoch if same_length else None,
    )


def restore_fold(run_dir: RunDir, attempt: int, before: RunSnapshot | None) -> FoldState:
    """Return the fold state of ``attempt``, or of the previous attempt, from the store.

    The records with the identity of the ranks and the length of the run may have been overwritten
    in the queues, so they cannot be read there again. ``before`` is the stored snapshot.
    """
    if before is None:
        return FoldState()
    try:
        with RunStore(run_dir) as store:
            records = store.hello_and_plan(attempt)
    except (ProblemError, sqlite3.Error):
        return FoldState()
    ranks = {
        rank: RankFold(rank=rank, hello=kinds.get("hello"), plan=kinds.get("plan"))
        for rank, kinds in records.items()
    }
    # The best throughput is that of the whole run, so it survives a resume.
    best = before.throughput.best_samples_per_s
    earlier_warnings = before.cautions if before.attempt == attempt else ()
    return FoldState(ranks=ranks, best_samples_per_s=best, warnings=earlier_warnings)


def with_values(fold: FoldState, values: StoredValues) -> FoldState:
    """Return the fold state with the stored values of all metrics instead of its own."""
    ranks = {
        number: replace(fold.ranks.get(number) or RankFold(rank=number), metrics={}, loss=None)
        for number in sorted({*fold.ranks, *values})
    }
    for number, logged in values.items():
        metrics = {name: value for name, value in logged.items() if name is not None}
        ranks[number] = replace(ranks[number], metrics=metrics, loss=logged.get(None))
    return replace(fold, ranks=ranks)
