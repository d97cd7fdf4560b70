"""Stall rule: no rank waits in a collective; each is where it is for a reason of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stalls.stall_case import (
    STOPPED_WORKER_SETTLE_S,
    StallCase,
    previous_step_was_slow,
    watched_too_briefly,
)
from ltui.training.diagnosis.stalls.stall_causes import STARVED_REMEDY, explain_rank, working_child
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason, stall_verdict
from ltui.training.diagnosis.verdict_words import activity_text, verb
from ltui.training.shared.record_types import Phase
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdict_kinds import VerdictKind


def lingering_ranks(inputs: PreparedInput) -> frozenset[int]:
    """Return the finished ranks whose pulse has not changed for a noticeable time."""
    return frozenset(
        r for r in inputs.ended if inputs.still_s.get(r, 0.0) > thresholds.SLOW_PHASE_EVIDENCE_DUE_S
    )


def not_exiting(inputs: PreparedInput, lingering: frozenset[int]) -> list[Verdict]:
    """Blame finished ranks whose process does nothing and does not exit.

    A rank that computes or writes, itself or in a child process, may export or upload what was
    trained.
    """
    ranks_by_place: dict[str | None, list[int]] = {}
    reasons: dict[int, StallReason] = {}
    for rank in sorted(lingering & inputs.settled.keys()):
        process = inputs.settled[rank].process
        if process is None or process.state in (None, "Z", "X"):
            continue
        if working_child(inputs.settled[rank]) is not None:
            continue
        reason = reasons[rank] = explain_rank(inputs, rank)
        stuck = reason.activity in (Activity.FROZEN, Activity.FAULT)
        if stuck and inputs.still_s[rank] > thresholds.EXIT_BUDGET_S:
            ranks_by_place.setdefault(reason.place, []).append(rank)
    verdicts = []
    for ranks in ranks_by_place.values():
        reason = reasons[ranks[0]]
        have = verb(ranks, "has finished and does", "have finished and do")
        text = f"{have} not exit: {verb(ranks, 'it', 'each')} {reason.text}"
        for_long = min(inputs.still_s[r] for r in ranks) > inputs.policy.slow_phase_s
        verdicts.append(
            stall_verdict(
                inputs,
                tuple(ranks),
                replace(reason, kind=VerdictKind.NOT_EXITING, text=text),
                level=VerdictLevel.STALLED if for_long else VerdictLevel.WARNING,
            )
        )
    return verdicts


_DATA_REMEDY = "More DataLoader workers, or cheaper samples."

Reasons = Mapping[int, StallReason]
"""rank -> why it makes no progress."""


def no_rank_waits(case: StallCase) -> list[Verdict] | None:
    """Judge every rank by itself, and all together if all are slow."""
    if not case.located or case.waiting:
        return None
    inputs = case.inputs
    ranks = tuple(sorted(inputs.alive))
    reasons = {r: explain_rank(inputs, r) for r in ranks}
    faults = [
        stall_verdict(inputs, (rank,), reason)
        for rank, reason in reasons.items()
        if reason.activity is Activity.FAULT and inputs.still_s[rank] > STOPPED_WORKER_SETTLE_S
    ]
    if faults:
        return faults
    if not _all_overdue(case, reasons):
        return []
    if any(watched_too_briefly(reason) for reason in reasons.values()):
        return []
    if any(reason.activity is Activity.FROZEN for reason in reasons.values()):
        return _frozen(case, reasons)
    if any(reason.activity is Activity.COMPILING for reason in reasons.values()):
        return _compiling(case, reasons)
    return _all_slow(case, reasons)


def _all_overdue(case: StallCase, reasons: Reasons) -> bool:
    """Return True if the budget of every rank has passed.

    If all ranks work and the step before was slow too, a shorter budget applies.
    """
    inputs = case.inputs
    activities = [reason.activity for reason in reasons.values()]
    # A single rank that is busy may be in an endless loop.
    works = activities != [Activity.BUSY] and all(
        a in (Activity.MOVING, Activity.BUSY) for a in activities
    )
    slow_again = works and previous_step_was_slow(inputs, reasons)
    return all(
        r in case.overdue or (slow_again and inputs.still_s[r] > thresholds.FAULT_SETTLE_S)
        for r in reasons
    )


def _frozen(case: StallCase, reasons: Reasons) -> list[Verdict]:
    frozen = tuple(r for r, reason in reasons.items() if reason.activity is Activity.FROZEN)
    first = reasons[frozen[0]]
    same_place = all(reasons[r].place == first.place for r in frozen)
    if len(frozen) == len(reasons) > 1 and same_place:
        text = f"are all stuck at the same place: each {first.text}"
        return [stall_verdict(case.inputs, frozen, replace(first, text=text))]
    return [stall_verdict(case.inputs, (r,), reasons[r]) for r in frozen]


def _compiling(case: StallCase, reasons: Reasons) -> list[Verdict]:
    compiling = tuple(r for r, reason in reasons.items() if reason.activity is Activity.COMPILING)
    starved = any(case.is_starved(r) for r in compiling)
    if case.shortest_still_s(reasons) <= thresholds.compiling_budget_s(starved):
        return []
    reason = reasons[compiling[0]]
    verdict = stall_verdict(case.inputs, compiling, reason, level=VerdictLevel.SLOW)
    return [replace(verdict, culprits=(), waiting=compiling)]


def _all_slow(case: StallCase, reasons: Reasons) -> list[Verdict]:
    """Report that every rank works, but for longer than ever before."""
    inputs, ranks = case.inputs, tuple(reasons)
    usual_s = thresholds.step_budget_s(inputs.policy, case.slowest_step_s)
    allowed_s = max(thresholds.MOVING_BUDGET_S, 1.5 * usual_s)
    if case.shortest_still_s(ranks) <= allowed_s and not previous_step_was_slow(inputs, ranks):
        return []
    first = reasons[ranks[0]]
    busy = all(reason.activity is Activity.BUSY for reason in reasons.values())
    if len(ranks) == 1 and busy:
        return [stall_verdict(inputs, ranks, first)]
    fetching = all(p.phase is Phase.FETCH for p in inputs.pulses_of(ranks).values())
    kind, remedy = VerdictKind.SLOW_STEP, None
    if all(case.is_starved(r) for r in ranks):
        bound = "short of processors (the machine is overloaded)"
        remedy = STARVED_REMEDY
    elif fetching:
        kind, bound, remedy = VerdictKind.SLOW_DATA, "data-bound", _DATA_REMEDY
    else:
        bound = "compute-bound" if busy else "slow"
    reason = StallReason(
        kind=kind,
        text=f"{'all ranks are' if len(ranks) > 1 else 'is'} {bound} in {first.place}"
        f"{activity_text(inputs.settled[ranks[0]].process)}; training continues slowly",
        activity=Activity.MOVING,
        place=first.place,
        remedy=remedy,
        confidence=0.8,
        frame=first.frame,
        facts=first.facts,
    )
    verdict = stall_verdict(inputs, ranks, reason, level=VerdictLevel.SLOW)
    cause = verdict.cause if len(ranks) == 1 else reason.text
    return [replace(verdict, culprits=(), cause=cause)]
