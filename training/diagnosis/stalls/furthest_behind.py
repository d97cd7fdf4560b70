"""Stall rule without evidence: the pulses alone show which rank is furthest behind. Pure."""

from __future__ import annotations

from dataclasses import replace

from ltui.training.diagnosis.judge_input import PreparedInput, progress_key
from ltui.training.diagnosis.stalls.stall_case import StallCase
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason, stall_verdict
from ltui.training.diagnosis.stalls.uneven_batches import find_uneven_ranks, uneven_verdict
from ltui.training.diagnosis.verdict_words import activity_text, verb
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdict_kinds import VerdictKind
from ltui.training.tensor_queue.record_types import STEP_PHASES, Phase


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
    if left_epoch:
        uneven = find_uneven_ranks(inputs, set(alive))
        if uneven is not None:
            return [uneven_verdict(inputs, uneven, None)]
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
