"""Ranks that left an epoch, a validation or training before the others. Pure.

Usually they have fewer batches. ``find_departure`` looks for the other case: a rank left an epoch
before the batches that Lightning had planned for every rank. Then ``trainer.should_stop`` was set
on that rank only, a hook skipped the rest of the epoch, or an error ended the data loader and was
swallowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ltui.training.diagnosis.collective_positions import UnfinishedCollective
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stalls.stall_case import Activity, StallReason, stall_verdict
from ltui.training.diagnosis.verdict_words import (
    EQUAL_BATCHES,
    EQUAL_PROGRAM_BATCHES,
    place_text,
    verb,
)
from ltui.training.shared.record_types import STEP_PHASES, Phase, PulseState
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdicts import VerdictKind

REMEDY = (
    "Set trainer.should_stop on all ranks together (reduce the decision over ranks first), return"
    " -1 from on_train_batch_start on all ranks or on none, and do not swallow errors in the data"
    " loader or in hooks."
)


class EarlyDeparture(Struct, frozen=True):
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


_EVALUATION = frozenset({Phase.VALIDATION, Phase.TEST, Phase.SANITY})


class UnevenRanks(Struct, frozen=True):
    """Ranks that left an epoch or a validation before the others."""

    ranks: tuple[int, ...]
    text: str
    """The predicate of a sentence whose subject is the ranks."""
    left_validation: bool = False
    """True if they left a validation and not a training epoch."""
    remedy: str = f"{EQUAL_BATCHES} limit_train_batches / limit_val_batches."


def find_uneven_ranks(inputs: PreparedInput, ranks: set[int]) -> UnevenRanks | None:
    """Return the ranks that left an epoch or a validation early.

    None if all ranks are at one stage. None as well if all of them evaluate, in different epochs:
    their training batches then say nothing about which rank is early.
    """
    pulses = inputs.pulses_of(ranks)
    if inputs.fold.program is not None:
        return _left_training(inputs, pulses)
    stages = {r: _stage(p) for r, p in pulses.items()}
    if len(set(stages.values())) < 2:
        return None
    evaluating = [r for r, p in pulses.items() if p.phase in _EVALUATION]
    if len(evaluating) == len(pulses):
        return None
    counts = {r: completed_batches(inputs, r) for r in pulses}
    if evaluating:
        if _training_batches_ran_out(evaluating, pulses, counts):
            return _left_epoch(inputs, tuple(sorted(evaluating)), pulses, counts)
        return _left_validation(inputs, evaluating, pulses)
    first_stage = min(stages.values())
    early = tuple(sorted(r for r, s in stages.items() if s != first_stage))
    return _left_epoch(inputs, early, pulses, counts)


def _left_training(inputs: PreparedInput, pulses: Mapping[int, PulseState]) -> UnevenRanks | None:
    """Return ranks of a program without Lightning that evaluate after a step before the others.

    Its epochs and batches are unknown, so the phases of training do not show who is early.
    """
    early = tuple(sorted(r for r, p in pulses.items() if p.phase in _EVALUATION))
    others = sorted(r for r in pulses if r not in early)
    if not early or not others:
        return None
    step = min(pulses[r].global_step for r in early)
    if any(pulses[r].global_step > step for r in others):
        return None
    text = (
        f"{verb(early, 'evaluates', 'evaluate')} after step {step} while"
        f" {inputs.ranks_text(others)} {verb(others, 'goes', 'go')} on: batch counts differ"
        " (uneven)"
    )
    return UnevenRanks(early, text, remedy=EQUAL_PROGRAM_BATCHES)


def _stage(pulse: PulseState) -> tuple[int, int]:
    """Return the epoch and 0 for its training, 1 for its validation, 2 for what follows."""
    if pulse.phase in STEP_PHASES:
        return pulse.epoch, 0
    return pulse.epoch, 1 if pulse.phase in _EVALUATION else 2


def _training_batches_ran_out(
    evaluating: list[int], pulses: Mapping[int, PulseState], counts: Mapping[int, int | None]
) -> bool:
    """Return True if ranks evaluate because their training batches ended before the others'."""
    epoch = min(pulses[r].epoch for r in evaluating)
    most_done = max(counts[r] or 0 for r in evaluating)
    return any(
        pulse.phase in STEP_PHASES
        and pulse.phase is not Phase.BATCH_END
        and pulse.epoch == epoch
        and (counts[rank] or 0) >= most_done
        for rank, pulse in pulses.items()
    )


def _left_validation(
    inputs: PreparedInput, evaluating: list[int], pulses: Mapping[int, PulseState]
) -> UnevenRanks:
    early = tuple(sorted(r for r in pulses if r not in evaluating))
    batch = max(pulses[r].batch for r in evaluating)
    evaluated = inputs.history.evaluated
    after = f" after {evaluated[early[0]]} batches" if early and early[0] in evaluated else ""
    text = (
        f"left validation{after} while {inputs.ranks_text(sorted(evaluating))}"
        f" {verb(evaluating, 'is', 'are')} still at validation batch {batch}:"
        " validation batch counts differ (uneven)"
    )
    return UnevenRanks(early, text, left_validation=True)


def _left_epoch(
    inputs: PreparedInput,
    early: tuple[int, ...],
    pulses: Mapping[int, PulseState],
    counts: Mapping[int, int | None],
) -> UnevenRanks:
    others = [r for r in pulses if r not in early]
    epoch = min((pulses[r].epoch for r in others), default=pulses[early[0]].epoch)
    done = counts[early[0]]
    after = f" after {done} batches" if done is not None else ""
    others_done = max(((counts[r] or 0) for r in others), default=0)
    text = (
        f"ended epoch {epoch}{after} while {inputs.ranks_text(sorted(others))} still"
        f" {verb(others, 'trains', 'train')} (batch {others_done + 1}): batch counts differ"
        " (uneven)"
    )
    return UnevenRanks(early, text)


def completed_batches(inputs: PreparedInput, rank: int) -> int | None:
    """Return the training batches that the rank completed in its last epoch with any."""
    rank_fold = inputs.fold.ranks.get(rank)
    if rank_fold is None or rank_fold.batch is None:
        return None
    pulse = inputs.pulses.get(rank)
    if pulse is not None and pulse.phase in STEP_PHASES and rank_fold.epoch != pulse.epoch:
        return pulse.batch
    return rank_fold.batch + 1


def uneven_verdict(
    inputs: PreparedInput, compared: set[int], unfinished: UnfinishedCollective | None
) -> Verdict | None:
    """Return the verdict on ranks that left an epoch or a validation before the others, or None.

    If they left an epoch although they have as many batches as the others, its reason is used.
    """
    uneven = find_uneven_ranks(inputs, compared)
    if uneven is None:
        return None
    ranks = uneven.ranks
    place = place_text(inputs.pulses.get(ranks[0]))
    others = unfinished.others(ranks) if unfinished is not None else ()
    departure = find_departure(inputs, ranks)
    if departure is not None and not uneven.left_validation:
        still_in_epoch = others or tuple(sorted(r for r in inputs.alive if r not in ranks))
        reason = departure_reason(inputs, departure, still_in_epoch, place)
        return stall_verdict(inputs, ranks, reason, others, unfinished)
    reason = StallReason(
        kind=VerdictKind.UNEVEN,
        text=uneven.text,
        activity=Activity.FAULT,
        place=place,
        remedy=uneven.remedy,
        confidence=0.9,
        facts={
            "epoch_batches": {
                str(r): dict(f.epoch_batches)
                for r, f in inputs.fold.ranks.items()
                if f.epoch_batches
            }
        },
    )
    return stall_verdict(inputs, ranks, reason, others, unfinished)


def finished_early_verdict(
    inputs: PreparedInput,
    early: tuple[int, ...],
    waiting: tuple[int, ...],
    unfinished: UnfinishedCollective,
) -> Verdict:
    """Return the verdict on ranks that finished training while others wait in a collective."""
    departure = find_departure(inputs, early)
    if departure is not None:
        reason = departure_reason(inputs, departure, waiting, "ended")
        return stall_verdict(inputs, early, reason, waiting, unfinished)
    if inputs.fold.program is not None:  # its batches are unknown
        steps = {r: p.global_step for r, p in inputs.pulses_of({early[0], *waiting}).items()}
        others_step = max((steps[r] for r in waiting if r in steps), default=steps[early[0]]) + 1
        text = f"finished early after step {steps[early[0]]} while others are at step {others_step}"
        remedy = EQUAL_PROGRAM_BATCHES
    else:
        done = completed_batches(inputs, early[0])
        others_done = max((completed_batches(inputs, r) or 0 for r in waiting), default=0)
        after = f" after {done} batches" if done is not None else ""
        text = f"finished early{after} while others are at batch {others_done + 1}"
        remedy = f"{EQUAL_BATCHES} limit_train_batches."
    reason = StallReason(
        kind=VerdictKind.FINISHED_EARLY,
        text=f"{text}: batch counts differ (uneven)",
        activity=Activity.FAULT,
        place="ended",
        remedy=remedy,
        confidence=0.9,
    )
    return stall_verdict(inputs, early, reason, waiting, unfinished)
