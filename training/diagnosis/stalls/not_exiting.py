"""Ranks that have finished training but do not exit. Pure."""

from __future__ import annotations

from dataclasses import replace

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stalls.stall_causes import explain_rank, working_child
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason, stall_verdict
from ltui.training.diagnosis.verdict_words import verb
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
