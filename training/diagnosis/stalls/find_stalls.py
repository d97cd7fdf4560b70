"""Find the ranks that make no progress, and the reason. Pure.

1. Ranks without progress for a first, short time are suspects: evidence of them is to be collected.
2. With evidence, the first unfinished collective decides. Ranks that enqueued something that cannot
   match are a mismatch. Ranks that did not come to it are the culprits, and each is explained by
   its process, workers and stack. If all came, the transport is at fault.
3. The budget depends on the reason: none for a fault that cannot mend itself, that of a step for a
   frozen rank, and more for a rank that works.
4. Without evidence, the pulses alone show which rank is furthest behind.
5. If no rank waits in a collective, each is where it is for a reason of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stalls import collective_mismatch, missing_ranks
from ltui.training.diagnosis.stalls.stall_case import (
    STOPPED_WORKER_SETTLE_S,
    Activity,
    StallCase,
    StallReason,
    build_case,
    find_suspects,
    previous_step_was_slow,
    stall_verdict,
    watched_too_briefly,
)
from ltui.training.diagnosis.stalls.stall_causes import STARVED_REMEDY, explain_rank, working_child
from ltui.training.diagnosis.verdict_words import activity_text, verb
from ltui.training.shared.record_types import Phase
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdicts import VerdictKind


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


Rule = Callable[[StallCase], list[Verdict] | None]
"""Returns None if it does not apply. An empty list means that nothing is to be reported yet."""

RULES: tuple[Rule, ...] = (
    missing_ranks.incomplete_rendezvous,
    collective_mismatch.mismatched_collective,
    missing_ranks.missing_ranks,
    collective_mismatch.finished_early,
    collective_mismatch.rank_died,
    missing_ranks.unobserved_ranks,
    collective_mismatch.all_ranks_wait,
    no_rank_waits,
    missing_ranks.furthest_behind,
)
"""The stall rules in the order in which they are tried. The first one that applies decides."""


class Stalls(Struct, frozen=True, kw_only=True):
    """Which ranks make no progress, and what is wrong with them."""

    verdicts: tuple[Verdict, ...] = ()
    suspects: frozenset[int] = frozenset()
    """Ranks of which evidence is to be collected."""
    waiting: frozenset[int] = frozenset()
    """Ranks that wait for others."""


def find_stalls(inputs: PreparedInput, slowest_step_s: float | None) -> Stalls:
    """Apply the stall rules to the ranks; ``slowest_step_s`` is the slowest recent step."""
    if inputs.ended and not inputs.alive and not inputs.silent_s:
        lingering = lingering_ranks(inputs)
        verdicts = not_exiting(inputs, lingering)
        return Stalls(verdicts=tuple(verdicts), suspects=lingering)
    suspects = find_suspects(inputs, slowest_step_s)
    if not suspects:
        return Stalls()
    case = build_case(inputs, slowest_step_s)
    answers = (rule(case) for rule in RULES)
    verdicts = next((verdicts for verdicts in answers if verdicts is not None), [])
    waiting = {r for v in verdicts for r in v.waiting}
    if not verdicts and case.overdue:
        waiting = {*case.overdue} - missing_ranks.ranks_furthest_behind(inputs)
    return Stalls(verdicts=tuple(verdicts), suspects=suspects, waiting=frozenset(waiting))
