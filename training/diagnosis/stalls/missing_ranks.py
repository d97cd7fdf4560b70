"""Stall rule: ranks are missing from a collective in which others wait. Pure."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.judge_input import PreparedInput, progress_key
from ltui.training.diagnosis.observations.collective_positions import collective_on_stack
from ltui.training.diagnosis.observations.stack_frames import has_frame, in_rendezvous
from ltui.training.diagnosis.stalls.collective_mismatch import crossed_groups_verdict
from ltui.training.diagnosis.stalls.stall_case import (
    STOPPED_WORKER_SETTLE_S,
    Activity,
    StallCase,
    StallReason,
    previous_step_was_slow,
    stall_verdict,
    watched_too_briefly,
)
from ltui.training.diagnosis.stalls.stall_causes import explain_rank
from ltui.training.diagnosis.stalls.uneven_batches import uneven_verdict
from ltui.training.diagnosis.verdict_words import activity_text, verb, waiting_text
from ltui.training.shared.record_types import STEP_PHASES, Phase
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.state.verdicts import VerdictKind


def furthest_behind(case: StallCase) -> list[Verdict] | None:
    """Blame the rank that is furthest behind.

    Report nothing if the ranks that are behind are within their own budget: they write a checkpoint
    or are merely slow.
    """
    if not case.overdue or case.evidence_may_come:
        return None
    inputs, alive = case.inputs, case.inputs.alive
    left_epoch = _ranks_past_the_epoch(case)
    behind = left_epoch or ranks_furthest_behind(inputs)
    culprits = tuple(sorted(left_epoch or behind & case.overdue))
    if not culprits:
        return []
    if left_epoch and (uneven := uneven_verdict(inputs, set(alive), None)) is not None:
        return [uneven]
    culprits_known = len(behind) < len(alive) or len(alive) == 1
    phase = alive[culprits[0]].phase.label
    seconds = max(inputs.still_s[r] for r in culprits)
    if culprits_known:
        have = verb(culprits, "has", "have")
        text = f"{have} made no progress in {phase} for {seconds:.0f} s"
        evidence = inputs.settled.get(culprits[0])
        text += activity_text(evidence.process if evidence is not None else None)
    else:
        text = (
            f"all {len(alive)} ranks have made no progress in {phase} for"
            f" {seconds:.0f} s; none is behind the others"
        )
    ended = inputs.ended
    ended_text = f"; {inputs.ranks_text(ended)} already ended" if ended else ""
    reason = StallReason(
        kind=VerdictKind.UNKNOWN,
        text=text,
        activity=Activity.FROZEN,
        place=phase,
        confidence=0.7 if culprits_known else 0.3,
    )
    longest_still = min(culprits, key=lambda r: alive[r].changed_ns)
    waiting = tuple(sorted(case.overdue - behind))
    verdict = stall_verdict(
        inputs, culprits, reason, waiting, budget_s=case.budget_s(longest_still)
    )
    if culprits_known:
        return [replace(verdict, cause=verdict.cause + ended_text)]
    return [replace(verdict, culprits=(), waiting=culprits, cause=text + ended_text)]


def _ranks_past_the_epoch(case: StallCase) -> set[int]:
    """Return ranks that ended an epoch in which others still wait in a batch's backward pass.

    With equal batch counts that cannot happen, so the budget of these ranks need not pass.
    """
    alive = case.inputs.alive
    in_backward = [alive[r] for r in case.overdue if alive[r].phase is Phase.BACKWARD]
    in_step = sum(p.phase in STEP_PHASES for p in alive.values())
    if not in_backward or len(in_backward) < in_step:
        return set()
    epoch = min(p.epoch for p in in_backward)
    after_epoch = (Phase.EPOCH_END, Phase.TEARDOWN)
    return {r for r, p in alive.items() if p.phase in after_epoch and p.epoch == epoch}


def ranks_furthest_behind(inputs: PreparedInput) -> set[int]:
    """Return the ranks that have made the least progress, by their pulses."""
    progress = {r: progress_key(p) for r, p in inputs.alive.items()}
    least = min(progress.values())
    return {r for r, key in progress.items() if key == least}


_WORKING_BUDGET_S = 60.0
"""Budget in seconds of a rank that works while others wait for it to join."""


def incomplete_rendezvous(case: StallCase) -> list[Verdict] | None:
    """Blame the ranks that have not joined the process group while others wait for them."""
    inputs, alive = case.inputs, case.inputs.alive
    inside = tuple(sorted(r for r, e in inputs.settled.items() if in_rendezvous(e.main_stack)))
    outside = [
        r
        for r, e in inputs.settled.items()
        if r not in inside and e.joined is not True and (r in alive or r in inputs.silent_s)
    ]
    if not inside or not outside or RankState.DEAD in inputs.states.values():
        return None
    waited_s = min(_age_s(inputs, r) for r in inside)
    verdicts = []
    for ranks in _outside_alike(inputs, outside):
        rank = ranks[0]
        reason = explain_rank(inputs, rank)
        stuck = reason.activity in (Activity.FROZEN, Activity.FAULT)
        budget_s = thresholds.FROZEN_BUDGET_S if stuck else _WORKING_BUDGET_S
        if waited_s <= budget_s or min(_age_s(inputs, r) for r in ranks) <= budget_s:
            continue
        has, each = verb(ranks, "has", "have"), verb(ranks, "it", "each")
        text = f"{has} not joined init_process_group: {each} {reason.text}"
        verdict = stall_verdict(
            inputs,
            ranks,
            replace(reason, kind=VerdictKind.RENDEZVOUS, text=text),
            level=VerdictLevel.STALLED if stuck else VerdictLevel.SLOW,
        )
        cause = verdict.cause + waiting_text(inside, "the rendezvous", inputs.machines)
        verdicts.append(replace(verdict, waiting=inside, cause=cause))
    return verdicts


def _outside_alike(inputs: PreparedInput, outside: list[int]) -> list[tuple[int, ...]]:
    """Group the ranks of each machine that have not joined for the same reason.

    On one machine, every rank is reported by itself.
    """
    groups: dict[Any, list[int]] = {}
    for rank in outside:
        reason = explain_rank(inputs, rank)
        alike = (inputs.machines.get(rank, rank), reason.kind, reason.place)
        groups.setdefault(alike, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _age_s(inputs: PreparedInput, rank: int) -> float:
    """Return the seconds without progress, or since the process of a silent rank started."""
    return inputs.still_s.get(rank, inputs.silent_s.get(rank, 0.0))


def missing_ranks(case: StallCase) -> list[Verdict] | None:
    """Blame the missing ranks: one verdict for each reason that keeps them away."""
    if not case.absent or not case.waiting:
        return None
    inputs, unfinished = case.inputs, case.unfinished
    if unfinished is not None and all(collective_on_stack(inputs.settled[r]) for r in case.absent):
        # The missing ranks wait in another collective themselves.
        ranks = {*case.absent, *case.waiting}
        uneven = uneven_verdict(inputs, ranks, unfinished)
        proven = case.shortest_still_s(ranks) > thresholds.FAULT_SETTLE_S
        if uneven is not None:
            return [uneven] if proven else []
        if unfinished.crossed:
            return [crossed_groups_verdict(inputs, unfinished)] if proven else []
    ranks_by_reason: dict[tuple[str, str | None, Frame | None], list[int]] = {}
    reasons: dict[int, StallReason] = {}
    for rank in case.absent:
        reason = explain_rank(inputs, rank)
        reasons[rank] = reason
        ranks_by_reason.setdefault((reason.kind, reason.place, reason.frame), []).append(rank)
    verdicts = (
        _verdict_if_due(case, tuple(ranks), reasons[ranks[0]]) for ranks in ranks_by_reason.values()
    )
    return [v for v in verdicts if v is not None]


def _verdict_if_due(
    case: StallCase, culprits: tuple[int, ...], reason: StallReason
) -> Verdict | None:
    """Return the verdict once the ranks have made no progress for longer than allowed.

    The budget and the level depend on the reason, and on whether the step before was slow too.
    """
    inputs, policy = case.inputs, case.inputs.policy
    rank = culprits[0]
    age_s = case.shortest_still_s((*culprits, *(r for r in case.waiting if r in inputs.still_s)))
    pulse = inputs.pulses.get(rank)
    phase = pulse.phase if pulse is not None else Phase.UNKNOWN
    longest_s = inputs.history.longest_s
    frozen_s = thresholds.frozen_budget_s(phase, policy, case.slowest_step_s, longest_s)
    slow_or_stalled = VerdictLevel.SLOW if age_s <= policy.slow_phase_s else VerdictLevel.STALLED
    level = VerdictLevel.STALLED
    if reason.activity is Activity.FAULT:
        worker_stopped = reason.kind is VerdictKind.WORKER_STOPPED
        allowed_s = STOPPED_WORKER_SETTLE_S if worker_stopped else thresholds.FAULT_SETTLE_S
    elif reason.kind is VerdictKind.CHECKPOINT:
        learned_s = policy.factor * longest_s.get(Phase.CHECKPOINT, 0.0)
        allowed_s = max(thresholds.CHECKPOINT_BUDGET_S, min(learned_s, policy.slow_phase_s))
        level = VerdictLevel.SLOW
    elif reason.activity is Activity.FROZEN:
        if watched_too_briefly(reason):
            return None
        allowed_s = frozen_s
        in_step = phase in STEP_PHASES
        if in_step and age_s <= allowed_s and previous_step_was_slow(inputs, culprits):
            # The slow step before has raised the budget of this one.
            allowed_s, level = thresholds.FAULT_SETTLE_S, VerdictLevel.SLOW
            reason = _as_straggler(reason)
    elif reason.activity is Activity.COMPILING:
        allowed_s = max(thresholds.compiling_budget_s(case.is_starved(rank)), frozen_s)
        level = slow_or_stalled
    elif phase not in STEP_PHASES or not thresholds.warmed_up(inputs.fold.ranks.get(rank)):
        # The rank indexes, scores or writes, and it is unknown how long that takes.
        prepares = has_frame(inputs.settled[rank].main_stack, "prepare_data")
        minimum_s = policy.slow_phase_s if prepares else thresholds.WARM_UP_BUDGET_S
        allowed_s = thresholds.moving_budget_s(frozen_s, minimum_s)
        level = slow_or_stalled
    elif reason.activity is Activity.BUSY:
        allowed_s = thresholds.busy_budget_s(frozen_s, reason.cpu_share)
    else:
        allowed_s = thresholds.moving_budget_s(frozen_s)
        if previous_step_was_slow(inputs, culprits):
            allowed_s = thresholds.FAULT_SETTLE_S
            reason = _as_straggler(reason)
        # A process that wakes up now and then may be slow, or may poll for ever.
        if age_s <= max(policy.cap_s, frozen_s):
            level = VerdictLevel.SLOW
    if age_s <= allowed_s:
        return None
    return stall_verdict(
        inputs, culprits, reason, case.waiting, case.unfinished, level=level, budget_s=allowed_s
    )


def _as_straggler(reason: StallReason) -> StallReason:
    return replace(reason, kind=VerdictKind.STRAGGLER, text=f"is the STRAGGLER: it {reason.text}")
