"""Stall rule: ranks wait in ``init_process_group`` for ranks that have not joined. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.observations.stack_frames import in_rendezvous
from ltui.training.diagnosis.stalls.stall_case import StallCase
from ltui.training.diagnosis.stalls.stall_causes import explain_rank
from ltui.training.diagnosis.stalls.stall_verdict import Activity, stall_verdict
from ltui.training.diagnosis.verdict_words import verb, waiting_text
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.state.verdict_kinds import VerdictKind

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
