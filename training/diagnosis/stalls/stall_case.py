"""Ranks without progress: the suspects, the facts that rules share, the reason, the verdict. Pure.

GPU problems may explain why a rank is slow or makes no progress. They come from ``training/gpu`` as
verdicts of their own, and are connected here with the rank that the other ranks wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.collective_positions import (
    UnfinishedCollective,
    collective_on_stack,
    find_unfinished_collective,
)
from ltui.training.diagnosis.evidence import Frame, RankEvidence
from ltui.training.diagnosis.judge_input import (
    RANKS_WITH_FACTS,
    PreparedInput,
    first_change_s,
    position_facts,
)
from ltui.training.diagnosis.stack_frames import active_compiler, collective_in, frame_facts
from ltui.training.diagnosis.verdict_words import collective_text, sizes_text, waiting_text
from ltui.training.shared.record_types import STEP_PHASES
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdicts import VerdictKind

SLOWING = {
    "gpu_thermal": "Check that GPU's cooling, or leave it out.",
    "gpu_power_brake": "Check the machine's power supply, or leave that GPU out.",
    "gpu_slow_clock": "Check that GPU's clocks and power limit (nvidia-smi -q), or leave it out.",
    "gpu_foreign": "Give the run GPUs of its own: trainer.devices=free:N.",
    "gpu_unseen": "Give the run GPUs of its own: trainer.devices=free:N.",
    "gpu_pcie_width": "Check that GPU's slot and riser, or leave it out.",
    "gpu_pcie_generation": "Check that GPU's slot and riser, or leave it out.",
}
"""kind -> remedy of GPU problems that slow a rank down, the most likely cause first."""
BREAKING = {
    "gpu_xid": "Check that GPU (dmesg, nvidia-smi -q), or leave it out.",
    "gpu_ecc": "Reset or replace that GPU, or leave it out.",
    "gpu_nvlink": "Check that GPU's NVLinks (nvidia-smi nvlink -s), or leave it out.",
}
"""kind -> remedy of GPU problems that stop a rank, the most likely cause first."""


class GpuCause(Struct, frozen=True, kw_only=True):
    """A problem with the GPU of a rank."""

    text: str
    """The verdict's cause with the GPU: ``GPU 1: thermal slowdown for 20 s (92 °C)``."""
    remedy: str


def gpu_cause(
    gpu_verdicts: Sequence[Verdict], ranks: Iterable[int], remedies: Mapping[str, str]
) -> GpuCause | None:
    """Return the problem with the GPU of one of the ranks that is of these kinds, or None.

    ``remedies`` are those of ``SLOWING``, which make it slower than others, or of ``BREAKING``,
    which make it unusable.
    """
    affected = set(ranks)
    for kind, remedy in remedies.items():
        for verdict in gpu_verdicts:
            if verdict.kind == kind and verdict.ended is None and affected & {*verdict.culprits}:
                return GpuCause(text=verdict.cause, remedy=remedy)
    return None


class Activity(Enum):
    """The behaviour of a rank without progress, which decides how long the rank may stay there."""

    FAULT = "fault"
    """It cannot continue by itself, so no time budget applies."""
    FROZEN = "frozen"
    """Its process does nothing."""
    BUSY = "busy"
    """It computes on one line of user code."""
    COMPILING = "compiling"
    """It compiles code."""
    MOVING = "moving"
    """It works, or wakes up now and then."""


class StallReason(Struct, frozen=True, kw_only=True):
    """Why one rank, or several ranks alike, make no progress."""

    kind: VerdictKind
    text: str
    """The predicate of a sentence whose subject is the rank: ``is stuck in forward``."""
    activity: Activity
    place: str | None = None
    frame: Frame | None = None
    remedy: str | None = None
    confidence: float = 0.9
    watched_s: float | None = None
    """Seconds for which the process was observed, if the reason is about a process."""
    cpu_share: float | None = None
    """Fraction of one core that the process used, if the reason is about a process."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further entries for the evidence of the verdict."""


def stall_verdict(
    inputs: PreparedInput,
    culprits: tuple[int, ...],
    reason: StallReason,
    waiting: tuple[int, ...] = (),
    unfinished: UnfinishedCollective | None = None,
    *,
    level: VerdictLevel = VerdictLevel.STALLED,
    budget_s: float | None = None,
) -> Verdict:
    """Return the verdict that ``culprits`` make no progress for ``reason`` and ``waiting`` wait.

    ``unfinished`` is the collective in which they wait, ``budget_s`` the budget that has passed.
    """
    pulses = inputs.pulses_of((*culprits, *waiting))
    waits_in = _wait_text(inputs, unfinished, waiting)
    cause = f"{inputs.ranks_text(culprits)} {reason.text}"
    cause += waiting_text(waiting, waits_in, inputs.machines)
    broken = gpu_cause(inputs.gpu_verdicts, culprits or waiting, BREAKING)
    if broken is not None:
        cause = f"{cause}; {broken.text}"
    evidence: dict[str, Any] = {
        "still_s": inputs.still_facts(pulses),
        "ranks": position_facts(pulses),
        **frame_facts(reason.frame),
        **reason.facts,
    }
    if budget_s is not None:
        evidence["budget_s"] = round(budget_s, 1)
    if unfinished is not None:
        if unfinished.seq >= 0:
            evidence["collective"] = {"group": unfinished.group, "seq": unfinished.seq}
        calls = {str(r): "absent" for r in unfinished.absent[:RANKS_WITH_FACTS]}
        for rank in sorted(unfinished.at)[: RANKS_WITH_FACTS - len(calls)]:
            entry = unfinished.at[rank]
            calls[str(rank)] = f"{entry.op} {sizes_text(entry)}"
        evidence["at"] = calls
    return Verdict(
        kind=reason.kind,
        level=level,
        culprits=culprits,
        waiting=waiting,
        place=reason.place,
        cause=cause,
        remedy=reason.remedy if broken is None else broken.remedy,
        confidence=reason.confidence,
        began=first_change_s(inputs.pulses_of(culprits)),
        evidence=evidence,
    )


def _wait_text(
    inputs: PreparedInput, unfinished: UnfinishedCollective | None, waiting: tuple[int, ...]
) -> str | None:
    """Return the collective that the waiting ranks are recorded in.

    If none is recorded, return the barrier or collective on their stacks, if it is the same.
    """
    entries = [unfinished.at[r] for r in waiting if r in unfinished.at] if unfinished else []
    if entries:
        return collective_text(entries[0])
    names = {_wait_name(inputs.settled[r]) for r in waiting if r in inputs.settled} - {None}
    return names.pop() if len(names) == 1 else None


def _wait_name(rank_evidence: RankEvidence) -> str | None:
    if rank_evidence.barrier:
        return f'barrier "{rank_evidence.barrier}"'
    return collective_on_stack(rank_evidence)


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
        held_up = {*unfinished.waiting} - _compiling_ranks(inputs, unfinished)
        compiling = {*unfinished.waiting} - held_up if held_up else ()
        return replace(
            case,
            located=True,
            unfinished=unfinished if held_up else None,
            waiting=tuple(sorted(held_up)),
            absent=tuple(sorted({*unfinished.absent, *compiling})) if held_up else (),
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


def _compiling_ranks(inputs: PreparedInput, unfinished: UnfinishedCollective) -> set[int]:
    """Return the ranks that compile in the middle of a backward pass which has begun collectives.

    They do not wait for what they have begun. Another finding comes first: ranks that are absent
    from the collective, or calls that do not match.
    """
    if unfinished.absent or unfinished.mismatched:
        return set()
    return {
        rank
        for rank in unfinished.waiting
        if (of_rank := inputs.settled.get(rank)) is not None
        and collective_in(of_rank.main_stack) is None
        and active_compiler(of_rank) is not None
    }


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
