"""Last and best values of a run's metrics over the steps that are still part of it. SQL only.

A supervisor continues with them, so that steps that a resume has left do not count.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from typing import Any

from ltui.training.state.metric_name_patterns import THROUGHPUT
from ltui.training.state.record_fold import METRIC_RANKS
from ltui.training.state.run_snapshot import MetricValue
from ltui.training.store.export_rows import Span
from ltui.training.store.history_windows import SAMPLES, STEPS
from ltui.training.store.series_query import Series, SeriesPart

StoredValues = dict[int, dict[str | None, MetricValue]]
"""Rank -> name of a logged metric, or None for the loss of the rank's steps -> its values."""


def stored_values(db: sqlite3.Connection, spans: Sequence[Span]) -> StoredValues:
    """Return the values of each metric, of the lowest rank that has logged it in these spans."""
    every: dict[str | None, Series] = {
        str(name): Series(SAMPLES, "value", (int(number),))
        for number, name in db.execute("SELECT id, name FROM names WHERE name != ?", (THROUGHPUT,))
    }
    values: StoredValues = {}
    for name, series in {**every, None: Series(STEPS, "loss")}.items():
        for rank in range(METRIC_RANKS):
            if name is None and not _reports_loss(db, spans, rank):
                continue
            value = _series_value([_part_values(db, series, span, rank) for span in spans])
            if value is not None:
                values.setdefault(rank, {})[name] = value
                break
    return values


def _reports_loss(db: sqlite3.Connection, spans: Sequence[Span], rank: int) -> bool:
    """Return whether the newest steps of a rank have a loss: on a GPU they have none."""
    parts = (SeriesPart(db, Series(STEPS, "loss"), s.attempt, rank) for s in reversed(spans))
    newest = next((p for p in parts if p.rows("1", "LIMIT 1").fetchone() is not None), None)
    return newest is not None and _since_first_loss(newest) is not None


_PartValues = tuple[float | None, float | None, tuple[int, float | None] | None]
"""Lowest and highest finite value, and step and value of the last row."""


def _series_value(parts: Sequence[_PartValues]) -> MetricValue | None:
    """Return the values of a series from those of its attempts, first to last."""
    last = next((last for _, _, last in reversed(parts) if last is not None), None)
    if last is None:
        return None
    step, value = last
    return MetricValue(
        last=math.nan if value is None else value,
        step=step,
        best_min=min((low for low, _, _ in parts if low is not None), default=None),
        best_max=max((high for _, high, _ in parts if high is not None), default=None),
    )


def _part_values(db: sqlite3.Connection, series: Series, span: Span, rank: int) -> _PartValues:
    """Return the values of one rank in one attempt.

    Windows that cover rows are read as well, which changes neither the lowest nor the highest.
    """
    part, column = SeriesPart(db, series, span.attempt, rank), series.column
    low = f"coalesce(low, {column})" if series.tables.combined else column
    high = f"coalesce(high, {column})" if series.tables.combined else column
    value = f"iif(n > 1, last, {column})" if series.tables.combined else column
    # The loss of a step is NULL if it is NaN, but also where a program reports none.
    since = "" if series.tables.combined else _since_first_loss(part)
    if since is None:
        return None, None, None
    up_to, newest = f"AND step <= ? {since}", "ORDER BY step DESC, seq DESC LIMIT 1"
    rows = part.rows(_lowest_and_highest(low, high), up_to, span.last_step).fetchone()
    windows = part.windows(
        _lowest_and_highest(f"{column}_low", f"{column}_high"),
        "AND last_step <= ?",
        span.last_step,
    ).fetchone()
    last = part.rows(f"step, {value}", f"{up_to} {newest}", span.last_step).fetchone()
    if last is None:
        last = part.windows(
            f"last_step, {column}_mean",
            f"AND last_step <= ? AND {column}_n > 0 ORDER BY last_step DESC LIMIT 1",
            span.last_step,
        ).fetchone()
    lows, highs = zip(rows, windows, strict=True)
    return _known(min, lows), _known(max, highs), last


def _since_first_loss(part: SeriesPart) -> str | None:
    """Return an SQL condition for the steps since the first loss; None if there is no loss."""
    (step,) = part.rows("min(step)", "AND loss IS NOT NULL").fetchone()
    if step is None and part.windows("1", "AND loss_n > 0 LIMIT 1").fetchone() is None:
        return None
    return f"AND step >= {int(step or 0)}"


def _lowest_and_highest(low: str, high: str) -> str:
    """Return SQL for the lowest and the highest finite value."""
    return f"min(iif(abs({low}) < 9e999, {low}, NULL)), max(iif(abs({high}) < 9e999, {high}, NULL))"


def _known(choose: Any, values: Sequence[float | None]) -> float | None:
    return choose((value for value in values if value is not None), default=None)  # type: ignore[no-any-return]
