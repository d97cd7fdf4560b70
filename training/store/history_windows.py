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

_FINEST = WINDOW_SIZES[0]
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


STEPS = TablePair("steps", "step_windows", ("attempt", "rank"), STEP_VALUES, "wall_s")
SAMPLES = TablePair(
    "samples", "sample_windows", ("attempt", "rank", "name_id"), ("value",), "t", combined=True
)


class SeriesWindows:
    """One series of a history that is written, and how far windows summarise its rows."""

    def __init__(
        self, connection: sqlite3.Connection, tables: TablePair, key: tuple[int, ...]
    ) -> None:
        """``key``: the values of ``tables.keys``."""
        self._connection, self._tables, self._key = connection, tables, key
        self._keys = ", ".join(tables.keys)
        self._where = " AND ".join(f"{name} = ?" for name in tables.keys)
        self._read()

    def _read(self) -> None:
        first, newest, self._rows = self._execute(
            f"SELECT min(step), max(step), count(*) FROM {self._tables.rows} "  # noqa: S608
            f"WHERE {self._where}"
        ).fetchone()
        self._first_step, self._newest_step = first or 0, newest or 0
        (window,) = self._execute(
            f"SELECT max(win) FROM {self._tables.windows} "  # noqa: S608
            f"WHERE {self._where} AND level = {_FINEST}"
        ).fetchone()
        # The first step that is in no closed window of the finest level.
        self._open_step = 0 if window is None else (int(window) + 1) * _FINEST

    def _execute(self, query: str, *more: int) -> sqlite3.Cursor:
        return self._connection.execute(query, (*self._key, *more))

    def add(self, newest_step: int, rows: int) -> None:
        """Close every window that ends before the newest step, after rows were inserted."""
        self._newest_step = max(self._newest_step, newest_step)
        self._rows += rows
        start, stop = self._open_step // _FINEST, self._newest_step // _FINEST
        if stop <= start:
            return
        self._close_from_rows(start, stop)
        for finer, level in _STEPS_UP:
            first, last = start * _FINEST // level, stop * _FINEST // level
            if last > first:
                self._close_from_windows(finer, level, first, last)
        self._open_step = stop * _FINEST

    def _close_from_rows(self, start: int, stop: int) -> None:
        tables = self._tables
        columns = [f"{v}_{part}" for v in tables.values for part in ("mean", "low", "high", "n")]
        values = ", ".join(tables.merged(v) for v in tables.values)
        first, n = "min(step)", "count(*)"
        if tables.combined:
            first, n = "min(coalesce(first_step, step))", "sum(coalesce(n, 1))"
        self._execute(
            f"INSERT OR REPLACE INTO {tables.windows} ({self._keys}, level, win, "  # noqa: S608
            f"first_step, last_step, epoch, wall_s, n, {', '.join(columns)}) "
            f"SELECT {self._keys}, {_FINEST}, step / {_FINEST}, {first}, max(step), avg(epoch), "
            f"avg({tables.time}), {n}, {values} FROM {tables.rows} "
            f"WHERE {self._where} AND step >= ? AND step < ? GROUP BY step / {_FINEST}",
            start * _FINEST,
            stop * _FINEST,
        )

    def _close_from_windows(self, finer: int, level: int, first: int, last: int) -> None:
        table, ratio = self._tables.windows, level // finer
        values = ", ".join(
            f"sum({v}_n), sum({v}_mean * {v}_n) / nullif(sum({v}_n), 0), min({v}_low), "
            f"max({v}_high)"
            for v in self._tables.values
        )
        self._execute(
            f"INSERT OR REPLACE INTO {table} "  # noqa: S608
            f"SELECT {self._keys}, {level}, win / {ratio}, min(first_step), max(last_step), "
            f"avg(epoch), avg(wall_s), sum(n), {values} FROM {table} "
            f"WHERE {self._where} AND level = {finer} AND win >= ? AND win < ? "
            f"GROUP BY win / {ratio}",
            first * ratio,
            last * ratio,
        )

    def drop_old(self, keep_rows: int, keep_windows: int) -> None:
        """Delete the oldest rows if there are too many, and windows that coarser ones cover."""
        if self._rows <= keep_rows * 1.1:
            return
        per_step = max(1.0, self._rows / max(1, self._newest_step - self._first_step))
        keep_from_step = self._newest_step - int(keep_rows / per_step)
        cut = min(keep_from_step, self._open_step) // _FINEST * _FINEST
        rows, windows = self._tables.rows, self._tables.windows
        self._execute(f"DELETE FROM {rows} WHERE {self._where} AND step < ?", cut)  # noqa: S608
        for finer, level in _STEPS_UP:
            closed = self._open_step // level * level
            window_cut = min(closed, self._open_step - keep_windows * finer) // finer
            if window_cut > 0:
                self._execute(
                    f"DELETE FROM {windows} "  # noqa: S608
                    f"WHERE {self._where} AND level = {finer} AND win < ?",
                    window_cut,
                )
        self._read()


class Series(Struct, frozen=True):
    """A column of a table of rows and of the table of its windows."""

    tables: TablePair
    column: str
    name_key: tuple[int, ...] = ()
    """Id of a logged metric in the table ``names``; empty for a column of ``steps``."""


class SeriesPart:
    """One series in one attempt, of one rank or, if ``rank`` is None, of all ranks."""

    def __init__(
        self,
        db: sqlite3.Connection,
        series: Series,
        attempt: int,
        rank: int | None = None,
        until: tuple[int, float] | None = None,
    ) -> None:
        """``until``: the step and the unix time up to which rows and windows are read."""
        self.tables, self.column, self.rank = series.tables, series.column, rank
        self._until = until
        ranks = () if rank is None else (rank,)
        conditions = ["attempt = ?", *("rank = ?" for _ in ranks)]
        conditions += ["name_id = ?" for _ in series.name_key]
        self._where = " AND ".join(conditions)
        self._key = (attempt, *ranks, *series.name_key)
        self._db = db

    def rows(self, columns: str, more: str = "", *parameters: int) -> sqlite3.Cursor:
        """Select from the rows. ``more`` continues the WHERE clause."""
        limit = f"AND step <= ? AND coalesce({self.tables.time}, 0) <= ?"
        return self._select(columns, self.tables.rows, limit, more, parameters)

    def windows(self, columns: str, more: str = "", *parameters: int) -> sqlite3.Cursor:
        """Select from the windows. ``more`` continues the WHERE clause."""
        limit = "AND last_step <= ? AND wall_s <= ?"
        return self._select(columns, self.tables.windows, limit, more, parameters)

    def has_values(self) -> bool:
        """Return whether there is a row or a window."""
        selections = (select("1", "LIMIT 1") for select in (self.rows, self.windows))
        return any(selection.fetchone() is not None for selection in selections)

    def _select(
        self, columns: str, table: str, limit: str, more: str, parameters: tuple[int, ...]
    ) -> sqlite3.Cursor:
        limits = self._until or ()
        return self._db.execute(
            f"SELECT {columns} FROM {table} WHERE {self._where} {limit * bool(limits)} {more}",  # noqa: S608
            (*self._key, *limits, *parameters),
        )
