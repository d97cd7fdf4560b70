"""Ranks that left an epoch before the batches that Lightning had planned for it. Pure.

If the data of all ranks are equally long, different batch counts are not the cause. Instead
``trainer.should_stop`` was set on one rank only, a hook skipped the rest of the epoch, or an error
ended the data loader and was swallowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason
from ltui.training.diagnosis.verdict_words import verb
from ltui.training.state.verdict_kinds import VerdictKind
from ltui.training.tensor_queue.record_types import STEP_PHASES

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
    """Batches of the epoch that the rank completed."""
    planned: int
    """Batches that Lightning had planned for the epoch."""


def find_departure(inputs: PreparedInput, ranks: Sequence[int]) -> EarlyDeparture | None:
    """Return the epoch that all of ``ranks`` left early; None if their data may be shorter."""
    departures = find_departures(inputs, ranks)
    of_all = set(departures.values())
    return of_all.pop() if len(of_all) == 1 and len(departures) == len(ranks) else None


def find_departures(inputs: PreparedInput, ranks: Sequence[int]) -> dict[int, EarlyDeparture]:
    """Return rank -> epoch that it left early, for those of ``ranks`` that left one."""
    planned = planned_batches(inputs)
    if planned is None:
        return {}
    departures = {rank: _departure_of(inputs, rank, planned) for rank in ranks}
    return {rank: departure for rank, departure in departures.items() if departure is not None}


def planned_batches(inputs: PreparedInput) -> int | None:
    """Return the batches of an epoch if Lightning planned the same number for every rank."""
    plans = [
        f.plan.get("batches_per_epoch") for f in inputs.fold.ranks.values() if f.plan is not None
    ]
    if len(plans) < max(2, len(inputs.pulses)) or len(set(plans)) > 1:
        return None
    planned = plans[0]
    return planned if isinstance(planned, int) and planned > 0 else None


def _departure_of(inputs: PreparedInput, rank: int, planned: int) -> EarlyDeparture | None:
    rank_fold, pulse = inputs.fold.ranks.get(rank), inputs.pulses.get(rank)
    if rank_fold is None or pulse is None:
        return None
    current_epoch = pulse.epoch if pulse.phase in STEP_PHASES else None
    for epoch, done in sorted(rank_fold.epoch_batches.items()):
        if epoch != current_epoch and done < planned:
            return EarlyDeparture(epoch, done, planned)
    return None


def departure_reason(
    inputs: PreparedInput, departure: EarlyDeparture, others: Sequence[int], place: str | None
) -> StallReason:
    """Return the reason of a stall; ``others`` are the ranks that are still in the epoch."""
    others_text = (
        f", while {inputs.ranks_text(others)} {verb(others, 'is', 'are')} still in it"
        if others
        else ""
    )
    return StallReason(
        kind=VerdictKind.LEFT_EARLY,
        text=f"left epoch {departure.epoch} early, after {departure.done} of {departure.planned}"
        f" planned batches{others_text}; every rank has the same number of batches",
        activity=Activity.FAULT,
        place=place,
        remedy=REMEDY,
        confidence=0.9,
        facts={
            "left_epoch": departure.epoch,
            "batches": departure.done,
            "planned_batches": departure.planned,
        },
    )
