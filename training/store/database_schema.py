"""The tables of ``run.db`` and how its layout is told: ``user_version``.

Layouts only grow: a newer ltui reads older files, an older one refuses newer files by name.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from ltui.training.problem import Problem, ProblemError

LAYOUT = 1

APPLICATION_ID = 0x6C747569
"""``ltui`` in ASCII, so that ``file`` and a careful reader know whose database it is."""

STEP_COLUMNS = (
    "step", "epoch", "batch", "samples", "loss", "lr", "step_s", "fetch_s", "forward_s",
    "backward_s", "optimizer_s", "memory_bytes", "memory_peak_bytes", "wall_s", "stepped",
    "transfer_s",
)  # fmt: skip
"""Columns of ``steps`` in the order of ``StepField``."""

# The ordering key of `steps` is (step, seq): rows arrive in that order, so inserts append, and the
# same record written twice is one row.
TABLES = """
CREATE TABLE attempts (
    attempt INTEGER PRIMARY KEY,
    started_at REAL, ended_at REAL, state TEXT, detail TEXT, exit_code INTEGER,
    resumed_path TEXT, resumed_step INTEGER, boot_id TEXT, changes TEXT, reason TEXT
);
CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), taken_at REAL, document TEXT);
CREATE TABLE cursors (
    attempt INTEGER, rank INTEGER, next_seq INTEGER, base INTEGER, inode INTEGER,
    PRIMARY KEY (attempt, rank)
) WITHOUT ROWID;
CREATE TABLE steps (
    attempt INTEGER, rank INTEGER, seq INTEGER,
    step INTEGER, epoch INTEGER, batch INTEGER, samples REAL, loss REAL, lr REAL,
    step_s REAL, fetch_s REAL, forward_s REAL, backward_s REAL, optimizer_s REAL,
    memory_bytes REAL, memory_peak_bytes REAL, wall_s REAL, stepped REAL, transfer_s REAL,
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
    gpu INTEGER, t REAL, utilisation_percent REAL, memory_utilisation_percent REAL,
    memory_used_bytes REAL, power_w REAL, temperature_c REAL, sm_clock_mhz REAL,
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


ADDED_COLUMNS = (("attempts", "changes", "TEXT"), ("attempts", "reason", "TEXT"))
"""Later than layout 1 and left empty by what knows nothing of them, so no layout of their own."""


class StoreError(ProblemError):
    """A run's database can't be read or written; ``str()`` says why and what to do."""


class NoHistoryError(StoreError):
    """Nothing has been written yet, or nothing is left of it."""


def no_history_error(path: Path, what: str) -> NoHistoryError:
    return NoHistoryError(Problem(where=str(path), what=what))


def store_error(path: Path, what: str, remedy: str | None = None) -> StoreError:
    return StoreError(Problem(where=str(path), what=what, remedy=remedy))


def damaged_error(path: Path, error: sqlite3.Error) -> StoreError:
    """Why the file can't be used, as a person is told."""
    if "locked" in str(error):
        what = "another program keeps the run's history locked."
        return store_error(path, what, "Close that program; the run itself is not touched.")
    return store_error(
        path,
        f"the run's history is damaged ({error}).",
        "Logs and checkpoints are not touched; a resume begins a new history beside it.",
    )


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the supervisor's connection, making the tables where the file is new.

    Raises ``StoreError`` where the file is damaged, or of a newer layout; ``sqlite3.Error`` where
    the disk is full.
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
        # Once it stands, whoever locks it holds up one tick of the supervisor, not its stops.
        connection.execute("PRAGMA busy_timeout = 500")
    except BaseException:
        connection.close()
        raise
    return connection


def _add_columns(connection: sqlite3.Connection) -> None:
    for table, column, kind in ADDED_COLUMNS:
        known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if column not in known:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")


CHECKED_BYTES = 256 << 20
"""Databases up to this size are read through before they are written to: half a second at most."""


def find_damage(path: Path) -> str | None:
    """What is wrong with an existing database; None where nothing is, or it can't be told now."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        connection = sqlite3.connect(path, timeout=5.0)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if path.stat().st_size > CHECKED_BYTES:
                return None
            said = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            return None if said == "ok" else said.splitlines()[-1]
        finally:
            connection.close()
    except sqlite3.OperationalError as error:  # locked, or the disk is full: no damage
        return str(error) if "malformed" in str(error) else None
    except sqlite3.DatabaseError as error:
        return str(error)


def rename_damaged(path: Path) -> Path:
    """Give a damaged database another name, so that a new one can be begun; nothing is deleted."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, aside)
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            os.rename(beside, aside.with_name(aside.name + suffix))
    return aside


def check_layout(path: Path, connection: sqlite3.Connection) -> int:
    """The layout of an open database, 0 where it is empty. Raises ``StoreError``."""
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
