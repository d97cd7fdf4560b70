"""Ranks of which evidence is to be collected, before a budget has passed. Pure."""

from __future__ import annotations

from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.judge_input import STEP_PHASES, PreparedInput
from ltui.training.diagnosis.stalls.stall_case import (
    STOPPED_WORKER_SETTLE_S,
    previous_step_was_slow,
)
from ltui.training.state.verdict_kinds import VerdictKind


def find_suspects(inputs: PreparedInput, slowest_step_s: float | None) -> frozenset[int]:
    """Return the ranks that have made no progress for a noticeable time."""
    suspects = set()
    for rank, pulse in inputs.alive.items():
        rank_fold = inputs.fold.ranks.get(rank)
        full_s = thresholds.budget_s(pulse, rank_fold, inputs.policy, slowest_step_s)
        due_s = thresholds.evidence_due_s(pulse, rank_fold, slowest_step_s, full_s)
        if rank in inputs.stopped_workers:
            due_s = min(due_s, STOPPED_WORKER_SETTLE_S)
        if pulse.phase in STEP_PHASES and previous_step_was_slow(inputs, (rank,)):
            due_s = min(due_s, thresholds.REPEATED_EVIDENCE_DUE_S)
        if inputs.still_s[rank] > due_s:
            suspects.add(rank)
    # A program that never sends telemetry is not interrupted for ever to collect evidence.
    joining = inputs.history.active_of(VerdictKind.RENDEZVOUS) is not None
    until_s = float("inf") if joining else inputs.policy.slow_phase_s
    suspects |= {r for r, s in inputs.silent_s.items() if thresholds.FROZEN_BUDGET_S < s <= until_s}
    return frozenset(suspects)
