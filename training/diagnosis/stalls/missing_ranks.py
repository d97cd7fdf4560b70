"""Stall rule: ranks are missing from a collective in which others wait. Pure."""

from __future__ import annotations

from dataclasses import replace

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.observations.collective_positions import collective_on_stack
from ltui.training.diagnosis.observations.stack_frames import has_frame
from ltui.training.diagnosis.stalls.collective_mismatch import crossed_groups_verdict
from ltui.training.diagnosis.stalls.stall_case import (
    STOPPED_WORKER_SETTLE_S,
    StallCase,
    previous_step_was_slow,
    watched_too_briefly,
)
from ltui.training.diagnosis.stalls.stall_causes import explain_rank
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason, stall_verdict
from ltui.training.diagnosis.stalls.uneven_batches import find_uneven_ranks, uneven_verdict
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdict_kinds import VerdictKind
from ltui.training.tensor_queue.record_types import STEP_PHASES, Phase


def missing_ranks(case: StallCase) -> list[Verdict] | None:
    """Blame the missing ranks: one verdict for each reason that keeps them away."""
    if not case.absent or not case.waiting:
        return None
    inputs, unfinished = case.inputs, case.unfinished
    if unfinished is not None and all(collective_on_stack(inputs.settled[r]) for r in case.absent):
        # The missing ranks wait in another collective themselves.
        ranks = {*case.absent, *case.waiting}
        uneven = find_uneven_ranks(inputs, ranks)
        proven = case.shortest_still_s(ranks) > thresholds.FAULT_SETTLE_S
        if uneven is not None:
            return [uneven_verdict(inputs, uneven, unfinished)] if proven else []
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
