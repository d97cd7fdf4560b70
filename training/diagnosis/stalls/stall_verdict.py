"""The reason why ranks make no progress, and the verdict that is built from it. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Any

from msgspec import Struct, field

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis.evidence import Frame, RankEvidence
from ltui.training.diagnosis.judge_input import (
    RANKS_WITH_FACTS,
    PreparedInput,
    first_change_s,
    position_facts,
)
from ltui.training.diagnosis.observations.collective_positions import (
    UnfinishedCollective,
    collective_on_stack,
)
from ltui.training.diagnosis.observations.gpu_causes import breaking_cause
from ltui.training.diagnosis.observations.stack_frames import frame_facts
from ltui.training.diagnosis.verdict_words import collective_text, sizes_text, waiting_text
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdict_kinds import VerdictKind


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
    gpu_cause = breaking_cause(inputs.gpu_verdicts, culprits or waiting)
    if gpu_cause is not None:
        cause = f"{cause}; {gpu_cause.text}"
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
        remedy=reason.remedy if gpu_cause is None else gpu_cause.remedy,
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
