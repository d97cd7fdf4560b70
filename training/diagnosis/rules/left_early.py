"""Ranks that left an epoch before the batches that Lightning had planned for it. Pure.

With equally long data on every rank that is no matter of batch counts: ``trainer.should_stop`` was
set on one rank alone, a hook skipped the rest of the epoch, or an error ended the data loader and
was swallowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ltui.training.diagnosis.rules.judge_input import STEP_PHASES, PreparedInput
from ltui.training.diagnosis.rules.stall_causes import StallReason
from ltui.training.diagnosis.rules.verdict_words import ranks_text, verb

REMEDY = (
    "Set trainer.should_stop on all ranks together (reduce the decision over ranks first), return"
    " -1 from on_train_batch_start on all ranks or on none, and do not swallow errors in the data"
    " loader or in hooks."
)


@dataclass(frozen=True, slots=True)
class EarlyDeparture:
    """An epoch that a rank left early."""

    epoch: int
    done: int
    """Batches that the rank completed in it."""
    planned: int


def departure(m: PreparedInput, ranks: Sequence[int]) -> EarlyDeparture | None:
    """The epoch that all of ``ranks`` left early; None where their data may have been shorter."""
    planned = planned_batches(m)
    found = {_departure(m, rank, planned) for rank in ranks} if planned is not None else set()
    return found.pop() if len(found) == 1 else None


def planned_batches(m: PreparedInput) -> int | None:
    """Batches of an epoch, where Lightning planned as many for every rank."""
    plans = [f.plan.get("batches_per_epoch") for f in m.fold.ranks.values() if f.plan is not None]
    if len(plans) < max(2, len(m.pulses)) or len(set(plans)) > 1:
        return None
    planned = plans[0]
    return planned if isinstance(planned, int) and planned > 0 else None


def _departure(m: PreparedInput, rank: int, planned: int) -> EarlyDeparture | None:
    folded, pulse = m.fold.ranks.get(rank), m.pulses.get(rank)
    if folded is None or pulse is None:
        return None
    trains_in = pulse.epoch if pulse.phase in STEP_PHASES else None
    for epoch, done in sorted(folded.epoch_batches.items()):
        if epoch != trains_in and done < planned:
            return EarlyDeparture(epoch, done, planned)
    return None


def reason(found: EarlyDeparture, others: Sequence[int], place: str | None) -> StallReason:
    """``others``: the ranks that are still in the epoch."""
    still = (
        f", while {ranks_text(others)} {verb(others, 'is', 'are')} still in it" if others else ""
    )
    return StallReason(
        kind="left_early",
        text=f"left epoch {found.epoch} early, after {found.done} of {found.planned} planned"
        f" batches{still}; every rank has the same number of batches",
        motion="fault",
        place=place,
        remedy=REMEDY,
        confidence=0.9,
        facts={"left_epoch": found.epoch, "batches": found.done, "planned_batches": found.planned},
    )
