"""Tables of ``run.db``, the version of its layout (``user_version``), and how it is opened.

Newer layouts only add to older ones: a newer ltui reads older files, and an older ltui refuses
newer files with an error that says so.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import is_regular_or_absent
from ltui.training.state.gpu_values import GPU_READINGS

LAYOUT = 1
"""Version of the layout that this ltui writes and the highest one that it reads."""

APPLICATION_ID = 0x6C747569
"""``ltui`` in ASCII; identifies the database as ours, also for the command ``file``."""

STEP_COLUMNS = (
    "step", "epoch", "batch", "samples", "loss", "lr", "step_s", "fetch_s", "forward_s",
    "backward_s", "optimizer_s", "memory_bytes", "memory_peak_bytes", "wall_s", "stepped",
    "transfer_s",
)  # fmt: skip
"""Columns of the table ``steps``: the first fields of ``StepField``, in their order. The rest of
its fields is not stored."""

# The ordering key of `steps` is (step, seq): rows arrive in that order, so inserts append, and the
# same record written twice is one row. A row of `samples` is one logged value, or `n` values that
# the rank has combined: then `value` is their mean, and `first_step` the step of the first one.
# `combined` counts the values that a rank has combined.
TABLES = f"""
CREATE TABLE attempts (
    attempt INTEGER PRIMARY KEY,
    started_at REAL, ended_at REAL, state TEXT, detail TEXT, exit_code INTEGER,
    resumed_path TEXT, resumed_step INTEGER, boot_id TEXT, changes TEXT, reason TEXT,
    parent INTEGER
);
CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), taken_at REAL, document TEXT);
CREATE TABLE cursors (
    attempt INTEGER, rank INTEGER, next_seq INTEGER, base INTEGER, inode INTEGER,
    combined INTEGER,
    PRIMARY KEY (attempt, rank)
) WITHOUT ROWID;
CREATE TABLE steps (
    attempt INTEGER, rank INTEGER, seq INTEGER, step INTEGER, epoch INTEGER, batch INTEGER,
    {", ".join(f"{name} REAL" for name in STEP_COLUMNS[3:])},
    PRIMARY KEY (attempt, rank, step, seq)
) WITHOUT ROWID;
CREATE TABLE step_windows (
    attempt INTEGER, rank INTEGER, level INTEGER, win INTEGER,
    first_step INTEGER, last_step INTEGER, epoch REAL, wall_s REAL, n INTEGER,
    loss_n INTEGER, loss_mean REAL, loss_low REAL, loss_high REAL,
    step_s_n INTEGER, step_s_mean REAL, step_s_low REAL, step_s_high REAL,
    fetch_s_n INTEGER, fetch_s_mean REAL, fetch_s_low REAL, fetch_s_high REAL,
    samples_n INTEGER, samples_mean REAL, samples_low REAL, samples_high REAL,
    lr_n INTEGER, lr_mean REAL, lr_low REAL, lr_high REAL,
    PRIMARY KEY (attempt, rank, level, win)
) WITHOUT ROWID;
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE samples (
    attempt INTEGER, rank INTEGER, name_id INTEGER, seq INTEGER,
    step INTEGER, epoch INTEGER, t REAL, value REAL,
    n INTEGER, low REAL, high REAL, last REAL, first_step INTEGER,
    PRIMARY KEY (attempt, rank, name_id, step, seq)
) WITHOUT ROWID;
CREATE TABLE sample_windows (
    attempt INTEGER, rank INTEGER, name_id INTEGER, level INTEGER, win INTEGER,
    first_step INTEGER, last_step INTEGER, epoch REAL, wall_s REAL, n INTEGER,
    value_n INTEGER, value_mean REAL, value_low REAL, value_high REAL,
    PRIMARY KEY (attempt, rank, name_id, level, win)
) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, attempt INTEGER, rank INTEGER, seq INTEGER, t REAL, kind TEXT,
    text TEXT, data TEXT, UNIQUE (attempt, rank, seq)
);
CREATE TABLE states (id INTEGER PRIMARY KEY, attempt INTEGER, t REAL, state TEXT, detail TEXT);
CREATE TABLE verdicts (
    id INTEGER PRIMARY KEY, attempt INTEGER, began REAL, ended REAL, kind TEXT, level TEXT,
    cause TEXT, document TEXT, UNIQUE (attempt, kind, began)
);
CREATE TABLE gpu_samples (
    gpu INTEGER, t REAL, {", ".join(f"{name} REAL" for name in GPU_READINGS)},
    PRIMARY KEY (gpu, t)
) WITHOUT ROWID;
CREATE TABLE process_samples (
    attempt INTEGER, rank INTEGER, t REAL, cpu_percent REAL, rss_bytes REAL,
    PRIMARY KEY (attempt, rank, t)
) WITHOUT ROWID;
CREATE TABLE gaps (
    id INTEGER PRIMARY KEY, attempt INTEGER, rank INTEGER, after_seq INTEGER, missed INTEGER,
    t REAL, reason TEXT
);
"""


ADDED_COLUMNS = {
    "attempts": {"changes": "TEXT", "reason": "TEXT", "parent": "INTEGER"},
    "cursors": {"combined": "INTEGER"},
    "samples": {
        "n": "INTEGER", "low": "REAL", "high": "REAL", "last": "REAL", "first_step": "INTEGER"
    },
    "steps": dict.fromkeys(STEP_COLUMNS[3:], "REAL"),
    "gpu_samples": dict.fromkeys(GPU_READINGS, "REAL"),
}  # fmt: skip
"""Table -> column -> type of columns that a history of layout 1 may lack.

The layout has the same number, because older versions leave these columns empty.
"""


class StoreError(ProblemError):
    """A run's database cannot be read or written; ``str()`` says why and what to do."""

    default_code = "unreadable-history"


class NoHistoryError(StoreError):
    """The run has no history yet, or it is gone."""

    default_code = "no-history"


def no_history_error(path: Path, what: str) -> NoHistoryError:
    return NoHistoryError.of(where=str(path), what=what)


def store_error(path: Path, what: str, remedy: str | None = None) -> StoreError:
    return StoreError.of(where=str(path), what=what, remedy=remedy)


def damaged_error(path: Path, error: Exception) -> StoreError:
    """Return the error that tells the user why the database cannot be used."""
    if "locked" in str(error):
        what = "another program keeps the run's history locked."
        return store_error(path, what, "Close that program; the run itself is not touched.")
    if "disk I/O error" in str(error):
        return store_error(
            path,
            "the run's history cannot be read or written (disk I/O error).",
            "Check the disk, its free space and the limit of the size of files (ulimit -f).",
        )
    if "interrupted" in str(error):
        return store_error(path, "reading the run's history takes too long.")
    return store_error(
        path,
        f"the run's history is damaged ({error}).",
        "Logs and checkpoints are not touched; a resume starts a new history and keeps this file.",
    )


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the supervisor's connection; create the tables if the file is new.

    Raise ``StoreError`` if the file is damaged or has a newer layout, and ``sqlite3.Error`` if the
    disk is full.
    """
    connection = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
    try:
        version = check_layout(path, connection)
        path.chmod(0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA cache_size = -4096")
        connection.execute("PRAGMA temp_store = MEMORY")
        if version == 0:
            connection.executescript(
                f"BEGIN IMMEDIATE;{TABLES}PRAGMA application_id = {APPLICATION_ID};"
                f"PRAGMA user_version = {LAYOUT};COMMIT;"
            )
        else:
            _add_columns(connection)
        # From here on, another program that locks the database delays only one tick of the
        # supervisor, and no stop.
        connection.execute("PRAGMA busy_timeout = 500")
    except BaseException:
        connection.close()
        raise
    return connection


def _add_columns(connection: sqlite3.Connection) -> None:
    for table, columns in ADDED_COLUMNS.items():
        for column in _missing(connection, table):
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {columns[column]}")


def _missing(connection: sqlite3.Connection, table: str) -> list[str]:
    present = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    return [column for column in ADDED_COLUMNS[table] if column not in present]


def _show_added_columns(connection: sqlite3.Connection) -> None:
    """Give a read-only database of an older version the columns that it lacks, without values.

    A temporary view stands before the table of its name and leaves the file as it is.
    """
    for table in ADDED_COLUMNS:
        if missing := _missing(connection, table):
            connection.execute("PRAGMA query_only = OFF")  # it forbids temporary views too
            columns = ", ".join(f"NULL AS {column}" for column in missing)
            view = f"SELECT *, {columns} FROM main.{table}"  # noqa: S608
            connection.execute(f"CREATE TEMP VIEW {table} AS {view}")
            connection.execute("PRAGMA query_only = ON")


CHECKED_BYTES = 256 << 20
"""Size up to which a database is checked completely before it is written; takes at most 0.5 s."""


def find_damage(path: Path) -> str | None:
    """Return what is wrong with an existing database; None if nothing is, or if it is unknown."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with closing(sqlite3.connect(path, timeout=5.0)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if path.stat().st_size > CHECKED_BYTES:
                return None
            result = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            return None if result == "ok" else result.splitlines()[-1]
    except sqlite3.OperationalError as error:
        # A locked database or a full disk is no damage.
        return str(error) if "malformed" in str(error) else None
    except sqlite3.DatabaseError as error:
        return str(error)


def rename_damaged(path: Path) -> Path:
    """Rename a damaged database so that a new one can be created; nothing is deleted."""
    renamed = free_damaged_path(path)
    os.rename(path, renamed)
    for suffix in ("-wal", "-shm"):
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            os.rename(companion, renamed.with_name(renamed.name + suffix))
    return renamed


def free_damaged_path(path: Path) -> Path:
    """Return an unused path for a damaged database: ``run.db.damaged-1``."""
    number = 1
    while (renamed := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return renamed


def check_layout(path: Path, connection: sqlite3.Connection) -> int:
    """Return the layout of an open database, 0 if it is empty. Raise ``StoreError``."""
    try:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
            raise
        raise damaged_error(path, error) from error
    if version > LAYOUT:
        raise store_error(
            path,
            f"it was written by a newer ltui (layout {version}, this one reads {LAYOUT}).",
            "Upgrade ltui to open this run.",
        )
    if version and application != APPLICATION_ID:
        raise store_error(path, "this is not a run's history.")
    return version


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
    """A connection whose queries end at ``deadline``. Texts that are not UTF-8 are mended.

    SQLite checks its file format itself. Here are limits for what a correct file may do: views and
    triggers are programs that may never end, a tree of pages may be endless, and a column of
    numbers may hold anything. Each is an ``sqlite3.DatabaseError``, as damage is.
    """

    deadline = math.inf
    """Monotonic time."""

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline


def open_for_reading(path: Path, *, is_copy: bool) -> UntrustedDatabase:
    """Open a history that anybody may have written. Raise ``StoreError``.

    ``is_copy``: nobody writes the file, which is only ever replaced as a whole.
    """
    if not path.exists():
        what = "the run has no history yet."
        if path.parent.parent.name != "runs":
            raise no_history_error(path, what)
        run = path.parent.name
        raise NoHistoryError.of(where=run, what=what, remedy=f"`ltui show {run}` says how it is.")
    uri = path.absolute().as_uri()
    try:
        if not is_copy:
            # On a read-only or full disk SQLite cannot create its shared index file. Then the
            # database is read as it is.
            with suppress(sqlite3.OperationalError):
                return _connect(path, f"{uri}?mode=ro")
        return _connect(path, f"{uri}?immutable=1")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # SQLite quotes a damaged schema in its messages, which then are no text.
        raise damaged_error(path, error) from error


def _connect(path: Path, uri: str) -> UntrustedDatabase:
    for name in (path.name, *(f"{path.name}-{part}" for part in ("wal", "shm", "journal"))):
        # SQLite would wait for the writer of a pipe.
        if not is_regular_or_absent(path.with_name(name)):
            raise sqlite3.DatabaseError(f"{name} is not a regular file")
    db = sqlite3.connect(
        uri, uri=True, timeout=2.0, check_same_thread=False, factory=UntrustedDatabase
    )
    try:
        db.text_factory = partial(str, encoding="utf-8", errors="replace")
        db.set_progress_handler(db.is_late, _OPERATIONS)
        if hasattr(db, "setlimit"):
            db.setlimit(_LENGTH_LIMIT, _MOST_BYTES)
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA query_only = ON")
        db.execute("PRAGMA cell_size_check = ON")
        if check_layout(path, db) == 0:
            raise no_history_error(path, "the run has no history yet.")
        _check_tables(db)
        _show_added_columns(db)
    except BaseException:
        db.close()
        raise
    return db


def _check_tables(db: sqlite3.Connection) -> None:
    """Raise ``sqlite3.DatabaseError`` unless the file holds plain tables of a usual size."""
    query = "SELECT type, name FROM sqlite_master WHERE rootpage IS NULL OR rootpage < 1"
    if (row := db.execute(query).fetchone()) is not None:
        # Virtual tables have no page either.
        raise sqlite3.DatabaseError(f"{row[1]} is a {row[0]} without rows")
    query = "SELECT 1 FROM attempts LIMIT 1 OFFSET ?"
    if db.execute(query, (MOST_ATTEMPTS,)).fetchone():
        raise sqlite3.DatabaseError(f"more than {MOST_ATTEMPTS} attempts")


def typed(rows: Iterable[tuple[Any, ...]], *kinds: Any) -> Iterator[tuple[Any, ...]]:
    """Yield rows whose values are of these kinds. Raise ``sqlite3.DataError`` at another one."""
    for row in rows:
        for value, kind in zip(row, kinds, strict=True):
            if not isinstance(value, kind):
                raise sqlite3.DataError(f"a column of another type holds {type(value).__name__}")
        yield row
