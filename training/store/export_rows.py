"""Rows of an export: every recorded value once, at the best resolution that is still stored.

A long history stores its latest steps one by one and older ones only as windows
(``training/store/history_windows.py``). An export takes each step from the finest level that
holds it.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from ltui.training.store.attempt_lineage import Span
from ltui.training.store.history_windows import SAMPLES, WINDOW_SIZES, TablePair


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One step, or one window of several steps; the ``value`` of a window is a mean."""

    metric: str
    step: int
    """The step, or the last step of a window."""
    epoch: int | None
    time: float | None
    rank: int
    value: float | None
    """None if the value was not a finite number (NaN)."""
    first_step: int | None = None
    """First step of a window; None for a single step, as are ``low`` and ``high``."""
    low: float | None = None
    high: float | None = None
    count: int = 1
    """Number of values that the row represents."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric in one attempt."""

    family: TablePair
    column: str
    name_key: tuple[int, ...]
    span: Span


Row = tuple[
    int, int, int | None, float | None, float | None, int | None, float | None, float | None, int
]
"""step, rank, epoch, time, value, first_step, low, high, count"""


def export_rows(db: sqlite3.Connection, metric: str, series: Series) -> Iterator[ExportRow]:
    """Yield the rows of every rank, by step and then by rank."""
    by_rank = [_rank_rows(db, series, rank) for rank in _ranks(db, series)]
    for step, rank, epoch, t, value, first, low, high, n in heapq.merge(
        *by_rank, key=itemgetter(0, 1)
    ):
        yield ExportRow(metric, step, epoch, t, rank, value, first, low, high, n)


def _ranks(db: sqlite3.Connection, series: Series) -> list[int]:
    where, key = _where(series, None)
    query = " UNION ".join(
        f"SELECT rank FROM {table} WHERE {where}"  # noqa: S608
        for table in (series.family.rows, series.family.windows)
    )
    return sorted(int(row[0]) for row in db.execute(query, (*key, *key)))


def _rank_rows(db: sqlite3.Connection, series: Series, rank: int) -> Iterator[Row]:
    """Yield windows from coarse to fine, each up to the first step that a finer level holds."""
    start = 0
    for size in reversed(WINDOW_SIZES):
        finer = _first_finer_step(db, series, rank, size)
        for window in _windows(db, series, rank, size, start, finer):
            start = (window[0] // size + 1) * size
            yield window
    yield from _steps(db, series, rank, start)


def _first_finer_step(db: sqlite3.Connection, series: Series, rank: int, size: int) -> int | None:
    where, key = _where(series, rank)
    row = db.execute(
        f"SELECT min(first) FROM (SELECT min(step) AS first FROM {series.family.rows} "  # noqa: S608
        f"WHERE {where} UNION ALL SELECT min(first_step) FROM {series.family.windows} "
        f"WHERE {where} AND level < ?)",
        (*key, *key, size),
    ).fetchone()
    return None if row[0] is None else int(row[0])


def _windows(
    db: sqlite3.Connection, series: Series, rank: int, size: int, start: int, finer: int | None
) -> Iterator[Row]:
    where, key = _where(series, rank)
    c = series.column
    for last, epoch, t, mean, first, low, high, n in db.execute(
        f"SELECT last_step, epoch, wall_s, {c}_mean, first_step, {c}_low, {c}_high, {c}_n "  # noqa: S608
        f"FROM {series.family.windows} WHERE {where} AND level = ? AND first_step >= ? "
        f"AND first_step < ? AND last_step <= ? AND {c}_n > 0 ORDER BY win",
        (*key, size, start, 1 << 62 if finer is None else finer, series.span.last_step),
    ):
        whole_epoch = None if epoch is None else int(epoch)
        yield last, rank, whole_epoch, t, mean, first, low, high, n


def _steps(db: sqlite3.Connection, series: Series, rank: int, start: int) -> Iterator[Row]:
    where, key = _where(series, rank)
    # A metric that was logged as NaN has a row without a value; a step without a loss has none.
    with_value = "" if series.family is SAMPLES else f"AND {series.column} IS NOT NULL "
    for step, epoch, t, value in db.execute(
        f"SELECT step, epoch, {series.family.time}, {series.column} FROM {series.family.rows} "  # noqa: S608
        f"WHERE {where} AND step >= ? AND step <= ? {with_value}ORDER BY step, seq",
        (*key, start, series.span.last_step),
    ):
        yield step, rank, epoch, t, value, None, None, None, 1


def _where(series: Series, rank: int | None) -> tuple[str, tuple[int, ...]]:
    where = "attempt = ?"
    key: tuple[int, ...] = (series.span.attempt,)
    if rank is not None:
        where, key = f"{where} AND rank = ?", (*key, rank)
    if series.name_key:
        where, key = f"{where} AND name_id = ?", (*key, *series.name_key)
    return where, key
