"""Severity levels of verdicts. They are in this package because policies of runs name them.

The members compare equal to the plain strings that runs store and send, so a level that was read
from a file is used without conversion. Levels of a later version stay plain strings. Pure.
"""

from __future__ import annotations

from enum import Enum


class VerdictLevel(str, Enum):
    """Severity of a verdict, the most severe first. The values are stored and must not change."""

    DEAD = "dead"
    """A rank's process has ended although the run has not."""
    STALLED = "stalled"
    """The run makes no progress."""
    SLOW = "slow"
    """The run makes progress, but more slowly than it could."""
    WARNING = "warning"
    """Nothing is slow yet; something may fail or slow down later."""

    __str__ = str.__str__


LEVELS: tuple[str, ...] = tuple(level.value for level in VerdictLevel)
"""Names of all levels, the most severe first, as a configuration writes them."""

BLOCKING_LEVELS: frozenset[str] = frozenset({VerdictLevel.DEAD, VerdictLevel.STALLED})
"""Levels at which the run does not advance; only these trigger the policy's ``then``."""


def severity(level: str) -> int:
    """Return 0 for the most severe level and more for others; an unknown level comes last."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)
