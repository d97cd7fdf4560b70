"""Ranks without progress that are suspects, and the facts that the stall rules share. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.observations.collective_positions import (
    UnfinishedCollective,
    collective_on_stack,
    find_unfinished_collective,
)
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason
from ltui.training.shared.record_types import STEP_PHASES
from ltui.training.state.verdict_kinds import VerdictKind

STOPPED_WORKER_SETTLE_S = 1.0
"""Seconds without progress after which a stopped DataLoader worker is reported."""
_EVIDENCE_PATIENCE_S = 6.0
"""Seconds past the budget after which missing evidence is not waited for any longer."""
_MINIMUM_WATCHED_S = 1.5
"""Seconds that a process must be watched before it counts as frozen: two rounds of evidence."""


class StallCase(Struct, frozen=True, kw_only=True):
    """The input of one judgement, and where its ranks are."""

    inputs: PreparedInput
    slowest_step_s: float | None
    overdue: frozenset[int] = frozenset()
    """Ranks whose budget has passed."""
    evidence_may_come: bool = False
    """True if evidence of some ranks is missing and may still be collected."""
    located: bool = False
    """True if evidence shows of every rank that is alive whether it waits in a collective."""
    unfinished: UnfinishedCollective | None = None
    """The collective at which the run hangs, if the ranks recorded it."""
    waiting: tuple[int, ...] = ()
    """Ranks that wait in a collective."""
    absent: tuple[int, ...] = ()
    """Ranks that are in no collective, or in another one, while others wait for them."""

    def budget_s(self, rank: int) -> float:
        """Return the seconds that the rank may make no progress."""
        inputs = self.inputs
        rank_fold = inputs.fold.ranks.get(rank)
        return thresholds.budget_s(
            inputs.pulses[rank], rank_fold, inputs.policy, self.slowest_step_s
        )

    def shortest_still_s(self, ranks: Iterable[int]) -> float:
        """Return for how many seconds all of the ranks have made no progress."""
        return min(self.inputs.still_s.get(r, 0.0) for r in ranks)

    def is_starved(self, rank: int) -> bool:
        """Return True if other processes use the rank's processor."""
        process = self.inputs.settled[rank].process
        return process is not None and process.starved


def build_case(inputs: PreparedInput, slowest_step_s: float | None) -> StallCase:
    """Compute which ranks are overdue and, from evidence, which of them wait for others."""
    case = StallCase(inputs=inputs, slowest_step_s=slowest_step_s)
    ranks = set(inputs.alive)
    overdue = frozenset(r for r in ranks if inputs.still_s[r] > case.budget_s(r))
    case = replace(case, overdue=overdue)
    if not ranks or not ranks <= inputs.settled.keys():
        over_s = min((inputs.still_s[r] - case.budget_s(r) for r in overdue), default=0.0)
        may_come = inputs.evidence_expected and over_s < _EVIDENCE_PATIENCE_S
        return replace(case, evidence_may_come=may_come)
    unfinished = find_unfinished_collective(inputs.settled, ranks)
    if unfinished is not None:
        return replace(
            case,
            located=True,
            unfinished=unfinished,
            waiting=unfinished.waiting,
            absent=unfinished.absent,
        )
    if any(inputs.settled[r].main_stack is None for r in ranks - inputs.stopped_pids.keys()):
        return case
    waiting = {r for r in ranks if collective_on_stack(inputs.settled[r]) is not None}
    return replace(
        case,
        located=True,
        waiting=tuple(sorted(waiting)),
        absent=tuple(sorted(ranks - waiting)) if waiting else (),
    )


def previous_step_was_slow(inputs: PreparedInput, ranks: Iterable[int]) -> bool:
    """Return True if the step before was slow on all ranks, so that this is no single delay."""
    return all(thresholds.last_step_was_slow(inputs.fold.ranks.get(r)) for r in ranks)


def watched_too_briefly(reason: StallReason) -> bool:
    """Return True if a process that appears frozen may only be slow."""
    watched_s = reason.watched_s
    return (
        reason.activity is Activity.FROZEN
        and watched_s is not None
        and watched_s < _MINIMUM_WATCHED_S
    )


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
