"""The reason why a rank makes no progress. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ltui.training.diagnosis.evidence import Frame
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReason:
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
