"""Selection of the steps that count: a resumed attempt replaces the steps after its checkpoint."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

_UNBOUNDED = 1 << 60
"""Last step of an attempt that no later attempt cuts off."""


@dataclass(frozen=True, slots=True)
class Span:
    """The steps of an attempt that count: those up to and including ``last_step``."""

    attempt: int
    last_step: int


def spans(connection: sqlite3.Connection) -> list[Span]:
    """Return the attempts with steps that count, first to last.

    An attempt replaces the earlier steps after its checkpoint only once it has trained a step
    itself.
    """
    rows = connection.execute(
        "SELECT a.attempt, a.resumed_step, "
        "EXISTS (SELECT 1 FROM steps s WHERE s.attempt = a.attempt) "
        "OR EXISTS (SELECT 1 FROM step_windows w WHERE w.attempt = a.attempt) "
        "FROM attempts a ORDER BY a.attempt DESC"
    ).fetchall()
    spans_newest_first: list[Span] = []
    last_step_that_counts = _UNBOUNDED
    for attempt, resumed_step, trained in rows:
        spans_newest_first.append(Span(attempt, last_step_that_counts))
        if trained and attempt > 1:
            last_step_that_counts = min(last_step_that_counts, resumed_step or 0)
    return [span for span in reversed(spans_newest_first) if span.last_step > 0]


def newest_trained(spans: Sequence[Span]) -> int:
    """Return the newest attempt that replaced steps of earlier ones; otherwise the first one."""
    unbounded = [span.attempt for span in spans if span.last_step == _UNBOUNDED]
    return min(unbounded, default=1)


def first_replaced_step(spans: Sequence[Span], attempt: int) -> int:
    """Return the first step that attempts later than ``attempt`` have replaced."""
    return max((span.last_step for span in spans if span.attempt <= attempt), default=-1) + 1
