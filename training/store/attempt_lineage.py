"""Which steps of which attempt count: a resumed attempt replaces what came after its checkpoint."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

_ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class Span:
    """Steps of ``attempt`` up to ``last_step`` (included) belong to the run's one line."""

    attempt: int
    last_step: int


def spans(connection: sqlite3.Connection) -> list[Span]:
    """The attempts whose steps count, first to last.

    An attempt supersedes the earlier ones' steps after its checkpoint once it has trained a step
    itself; before that nothing was redone.
    """
    rows = connection.execute(
        "SELECT a.attempt, a.resumed_step, "
        "EXISTS (SELECT 1 FROM steps s WHERE s.attempt = a.attempt) "
        "OR EXISTS (SELECT 1 FROM step_windows w WHERE w.attempt = a.attempt) "
        "FROM attempts a ORDER BY a.attempt DESC"
    ).fetchall()
    kept: list[Span] = []
    bound = _ENDLESS
    for attempt, resumed_step, trained in rows:
        kept.append(Span(attempt, bound))
        if trained and attempt > 1:
            bound = min(bound, resumed_step or 0)
    return [span for span in reversed(kept) if span.last_step > 0]
