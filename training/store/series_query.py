"""One series of a run's history, and the SQL that selects it."""

from __future__ import annotations

import sqlite3

from msgspec import Struct

from ltui.training.store.history_windows import TablePair


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
