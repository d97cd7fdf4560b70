"""Windows that summarise a long history: count, mean, min and max of 64, 4,096 and 262,144 steps.

A window of one level is computed from the closed windows of the level below. So nothing needs to be
held in memory, and a new supervisor continues where the last one ended. SQL only; no clock, no
files.
"""

from __future__ import annotations

import itertools
import sqlite3

from msgspec import Struct

WINDOW_SIZES = (64, 4096, 262144)
"""Number of steps of a window at each level, finest first; each is a multiple of the previous."""

STEP_VALUES = ("loss", "step_s", "fetch_s", "samples", "lr")
"""Columns of ``steps`` that are summarised in windows."""

_STEPS_UP = tuple(itertools.pairwise(WINDOW_SIZES))


class TablePair(Struct, frozen=True):
    """A table of rows and the table of their windows."""

    rows: str
    windows: str
    keys: tuple[str, ...]
    """Columns that identify a series."""
    values: tuple[str, ...]
    time: str
    """Column of the rows that holds the unix time."""
    combined: bool = False
    """True if a row may be several values: ``n``, ``low``, ``high`` and ``first_step``."""

    def merged(self, value: str) -> str:
        """Return SQL for mean, lowest, highest and number of the values in a group of rows."""
        if not self.combined:
            return f"avg({value}), min({value}), max({value}), count({value})"
        n = f"iif({value} IS NULL, 0, coalesce(n, 1))"
        return (
            f"sum({value} * {n}) / nullif(sum({n}), 0), min(coalesce(low, {value})), "
            f"max(coalesce(high, {value})), sum({n})"
        )

    def single(self, value: str) -> str:
        """Return SQL for the same of one row."""
        if not self.combined:
            return f"{value}, {value}, {value}, {value} IS NOT NULL"
        return (
            f"{value}, coalesce(low, {value}), coalesce(high, {value}), "
            f"iif({value} IS NULL, 0, coalesce(n, 1))"
        )

    def where(self) -> str:
        """Return an SQL condition that selects one series."""
        return " AND ".join(f"{key} = ?" for key in self.keys)


STEPS = TablePair("steps", "step_windows", ("attempt", "rank"), STEP_VALUES, "wall_s")
SAMPLES = TablePair(
    "samples", "sample_windows", ("attempt", "rank", "name_id"), ("value",), "t", combined=True
)


def first_open_step(connection: sqlite3.Connection, family: TablePair, key: tuple[int, ...]) -> int:
    """Return the first step of a series that is in no closed window of the finest level."""
    row = connection.execute(
        f"SELECT max(win) FROM {family.windows} WHERE {family.where()} AND level = ?",  # noqa: S608
        (*key, WINDOW_SIZES[0]),
    ).fetchone()
    return 0 if row[0] is None else (int(row[0]) + 1) * WINDOW_SIZES[0]


def close_windows(
    connection: sqlite3.Connection,
    family: TablePair,
    key: tuple[int, ...],
    *,
    open_step: int,
    newest_step: int,
) -> int:
    """Close every window that ends before ``newest_step``; return the first step still open."""
    start = open_step // WINDOW_SIZES[0]
    stop = newest_step // WINDOW_SIZES[0]
    if stop <= start:
        return open_step
    _close_from_rows(connection, family, key, start, stop)
    for finer, level in _STEPS_UP:
        first, last = start * WINDOW_SIZES[0] // level, stop * WINDOW_SIZES[0] // level
        if last > first:
            _close_from_windows(connection, family, key, finer, level, first, last)
    return stop * WINDOW_SIZES[0]


def _close_from_rows(
    connection: sqlite3.Connection, family: TablePair, key: tuple[int, ...], start: int, stop: int
) -> None:
    size = WINDOW_SIZES[0]
    columns = [f"{v}_{part}" for v in family.values for part in ("mean", "low", "high", "n")]
    values = ", ".join(family.merged(v) for v in family.values)
    first, n = "min(step)", "count(*)"
    if family.combined:
        first, n = "min(coalesce(first_step, step))", "sum(coalesce(n, 1))"
    connection.execute(
        f"INSERT OR REPLACE INTO {family.windows} ({', '.join(family.keys)}, level, win, "  # noqa: S608
        f"first_step, last_step, epoch, wall_s, n, {', '.join(columns)}) "
        f"SELECT {', '.join(family.keys)}, {size}, step / {size}, {first}, max(step), "
        f"avg(epoch), avg({family.time}), {n}, {values} FROM {family.rows} "
        f"WHERE {family.where()} AND step >= ? AND step < ? GROUP BY step / {size}",
        (*key, start * size, stop * size),
    )


def _close_from_windows(
    connection: sqlite3.Connection,
    family: TablePair,
    key: tuple[int, ...],
    finer: int,
    level: int,
    first: int,
    last: int,
) -> None:
    values = ", ".join(
        f"sum({v}_n), sum({v}_mean * {v}_n) / nullif(sum({v}_n), 0), min({v}_low), max({v}_high)"
        for v in family.values
    )
    ratio = level // finer
    connection.execute(
        f"INSERT OR REPLACE INTO {family.windows} "  # noqa: S608
        f"SELECT {', '.join(family.keys)}, {level}, win / {ratio}, min(first_step), "
        f"max(last_step), avg(epoch), avg(wall_s), sum(n), {values} FROM {family.windows} "
        f"WHERE {family.where()} AND level = {finer} AND win >= ? AND win < ? "
        f"GROUP BY win / {ratio}",
        (*key, first * ratio, last * ratio),
    )


def drop_old(
    connection: sqlite3.Connection,
    family: TablePair,
    key: tuple[int, ...],
    *,
    keep_from_step: int,
    open_step: int,
    keep_windows: int,
) -> None:
    """Delete rows before ``keep_from_step`` and old windows if coarser windows cover them."""
    cut = min(keep_from_step, open_step) // WINDOW_SIZES[0] * WINDOW_SIZES[0]
    connection.execute(
        f"DELETE FROM {family.rows} WHERE {family.where()} AND step < ?",  # noqa: S608
        (*key, cut),
    )
    for finer, level in _STEPS_UP:
        closed = open_step // level * level
        window_cut = min(closed, open_step - keep_windows * finer) // finer
        if window_cut > 0:
            connection.execute(
                f"DELETE FROM {family.windows} WHERE {family.where()} "  # noqa: S608
                f"AND level = {finer} AND win < ?",
                (*key, window_cut),
            )


class Series(Struct, frozen=True):
    """A column of a table of rows and of the table of its windows."""

    tables: TablePair
    column: str
    name_key: tuple[int, ...] = ()
    """Id of a logged metric in the table ``names``; empty for a column of ``steps``."""


class SeriesPart:
    """One series in one attempt, of one rank or, if ``rank`` is None, of all ranks."""

    def __init__(
        self, db: sqlite3.Connection, series: Series, attempt: int, rank: int | None = None
    ) -> None:
        self.tables, self.column, self.rank = series.tables, series.column, rank
        ranks = () if rank is None else (rank,)
        conditions = ["attempt = ?", *("rank = ?" for _ in ranks)]
        conditions += ["name_id = ?" for _ in series.name_key]
        self._where = " AND ".join(conditions)
        self._key = (attempt, *ranks, *series.name_key)
        self._db = db

    def rows(self, columns: str, more: str = "", *parameters: int) -> sqlite3.Cursor:
        """Select from the rows. ``more`` continues the WHERE clause."""
        return self._select(columns, self.tables.rows, more, parameters)

    def windows(self, columns: str, more: str = "", *parameters: int) -> sqlite3.Cursor:
        """Select from the windows. ``more`` continues the WHERE clause."""
        return self._select(columns, self.tables.windows, more, parameters)

    def _select(
        self, columns: str, table: str, more: str, parameters: tuple[int, ...]
    ) -> sqlite3.Cursor:
        return self._db.execute(
            f"SELECT {columns} FROM {table} WHERE {self._where} {more}",  # noqa: S608
            (*self._key, *parameters),
        )
