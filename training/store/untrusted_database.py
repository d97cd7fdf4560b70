"""A read-only connection to a ``run.db`` that anybody may have written.

SQLite checks its file format itself. Here are limits for what a correct file may do: views and
triggers are programs that may never end, a tree of pages may be endless, and a column of numbers
may hold anything. Each is an ``sqlite3.DatabaseError``, as damage is.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ltui.training.shared.regular_files import is_regular_or_absent

LIMIT_S = 10.0
"""Seconds for one look-up in the history, which takes milliseconds."""
MOST_ATTEMPTS = 10_000
"""Maximum number of attempts of a run."""
_MOST_BYTES = 64 << 20
"""Maximum length of a text; the snapshot of a run with 1,024 ranks has 2 MB."""
_OPERATIONS = 20_000
"""Operations of SQLite between two looks at the clock, about a millisecond."""
_LENGTH_LIMIT = 0
"""``SQLITE_LIMIT_LENGTH``, which the module names only since Python 3.11."""

WHOLE = int
REAL = (int, float, type(None))
TEXT = (str, type(None))


class UntrustedDatabase(sqlite3.Connection):
    """A connection whose queries end at ``deadline``. Texts that are not UTF-8 are mended."""

    deadline = math.inf
    """Monotonic time."""

    @classmethod
    def open(cls, path: Path, uri: str) -> UntrustedDatabase:
        """Open the file at ``path``. Raise ``sqlite3.DatabaseError``."""
        for name in (path.name, *(f"{path.name}-{part}" for part in ("wal", "shm", "journal"))):
            # SQLite would wait for the writer of a pipe.
            if not is_regular_or_absent(path.with_name(name)):
                raise sqlite3.DatabaseError(f"{name} is not a regular file")
        db = sqlite3.connect(uri, uri=True, timeout=2.0, check_same_thread=False, factory=cls)
        db.text_factory = partial(str, encoding="utf-8", errors="replace")
        db.set_progress_handler(db._is_late, _OPERATIONS)
        if hasattr(db, "setlimit"):
            db.setlimit(_LENGTH_LIMIT, _MOST_BYTES)
        try:
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute("PRAGMA query_only = ON")
            db.execute("PRAGMA cell_size_check = ON")
        except BaseException:
            db.close()
            raise
        return db

    def check_tables(self) -> None:
        """Raise ``sqlite3.DatabaseError`` unless the file holds plain tables of a usual size."""
        query = "SELECT type, name FROM sqlite_master WHERE rootpage IS NULL OR rootpage < 1"
        if (row := self.execute(query).fetchone()) is not None:
            # Virtual tables have no page either.
            raise sqlite3.DatabaseError(f"{row[1]} is a {row[0]} without rows")
        query = "SELECT 1 FROM attempts LIMIT 1 OFFSET ?"
        if self.execute(query, (MOST_ATTEMPTS,)).fetchone():
            raise sqlite3.DatabaseError(f"more than {MOST_ATTEMPTS} attempts")

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline


def typed(rows: Iterable[tuple[Any, ...]], *kinds: Any) -> Iterator[tuple[Any, ...]]:
    """Yield rows whose values are of these kinds. Raise ``sqlite3.DataError`` at another one."""
    for row in rows:
        for value, kind in zip(row, kinds, strict=True):
            if not isinstance(value, kind):
                raise sqlite3.DataError(f"a column of another type holds {type(value).__name__}")
        yield row
