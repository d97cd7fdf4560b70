"""``index.db`` in ltui's home: what lists show of every run that has ended.

The index only saves time. It can be deleted at any moment and is built again from the runs: a
missing, damaged or differently versioned one begins empty, and a run whose files have changed is
read anew.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ltui.app.runs.run_entry import MetricValues, RunEntry, RunSummary
from ltui.training.json_codec import WRONG_CONTENT
from ltui.training.state.run_labels import NO_LABELS, labels_from_document
from ltui.training.store.run_directory import RunDir

INDEX_NAME = "index.db"
VERSION = 7
"""Version of the rows (``user_version``). Raise it when ``RunSummary`` or a table changes."""
_TABLES = """
CREATE TABLE runs (id TEXT PRIMARY KEY, stamp TEXT, row BLOB, metrics BLOB) WITHOUT ROWID;
CREATE TABLE heads (id TEXT PRIMARY KEY, head TEXT) WITHOUT ROWID;
CREATE TABLE slow_values (
    kind TEXT, id TEXT, stamp TEXT, value TEXT, PRIMARY KEY (kind, id)
) WITHOUT ROWID;
"""
_DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""Errors of a damaged file. SQLite's messages quote what it holds, which may be no text."""
_WAIT_S = 1.0
"""Seconds to wait while another ltui writes the index."""


class IndexedRun(Struct, frozen=True):
    """A run as the index holds it."""

    stamp: str
    """Times and sizes of the run's files when it was read."""
    entry: RunEntry
    head: dict[str, Any] | None = None
    """The run's part of ``ltui runs --json``; only needed to write."""


class Stamped(Struct, frozen=True):
    """A value of a run that takes long to read."""

    stamp: str
    """Times and sizes of the files that it was read from."""
    value: Any


class RunIndex:
    """The index of one home. In memory only if the file cannot be opened."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._connection = _open(home / INDEX_NAME)

    def close(self) -> None:
        self._connection.close()

    def read(self) -> dict[str, IndexedRun]:
        """Return all runs by id. Rows that cannot be understood are left out."""
        query = "SELECT id, stamp, row, metrics FROM runs"
        try:
            rows = self._connection.execute(query).fetchall()
        except _DAMAGE:
            self._begin_anew()
            return {}
        names: dict[tuple[str, ...], tuple[str, ...]] = {}
        indexed: dict[str, IndexedRun] = {}
        folder = self._home / "runs"
        decode = msgspec.msgpack.Decoder(_Row).decode
        for run_id, stamp, packed_row, packed in rows:
            with suppress(*WRONG_CONTENT):
                row = decode(packed_row)
                entry = RunEntry(
                    run_dir=RunDir(folder / run_id),
                    summary=row.summary,
                    labels=NO_LABELS if row.labels is None else labels_from_document(row.labels),
                    # The names of metrics are stored once.
                    metrics=MetricValues(names.setdefault(row.names, row.names), packed),
                    problem=row.problem,
                )
                indexed[run_id] = IndexedRun(stamp, entry)
        return indexed

    def heads(self) -> dict[str, str]:
        """Return the parts of ``ltui runs --json`` by the id of the run, as JSON."""
        query = "SELECT id, head FROM heads WHERE json_valid(head) AND head LIKE '{%}'"
        with suppress(*_DAMAGE):
            return dict(self._connection.execute(query).fetchall())
        return {}

    def write(self, changed: Iterable[IndexedRun], removed: Iterable[str]) -> None:
        """Replace and remove runs. Nothing happens if the index cannot be written: it will be
        tried again when the runs are read the next time."""
        rows, heads, gone = [], [], [(run_id,) for run_id in removed]
        for run in changed:
            # A text that is no Unicode and a number of more than 64 bits cannot be packed: such a
            # run is read anew by every ltui.
            with suppress(UnicodeEncodeError, OverflowError):
                row = _packed_row(run.entry)
                rows.append((run.entry.id, run.stamp, row, run.entry.metrics.packed))
                heads.append((run.entry.id, json.dumps(run.head)))
        if not rows and not gone:
            return
        with suppress(*_DAMAGE), self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", rows)
            connection.executemany("INSERT OR REPLACE INTO heads VALUES (?, ?)", heads)
            connection.executemany("DELETE FROM runs WHERE id = ?", gone)
            connection.executemany("DELETE FROM heads WHERE id = ?", gone)
            connection.executemany("DELETE FROM slow_values WHERE id = ?", gone)

    def read_values(self, kind: str) -> dict[str, Stamped]:
        """Return the values of a kind by the id of the run; none if they are damaged."""
        query = "SELECT id, stamp, value FROM slow_values WHERE kind = ?"
        with suppress(*_DAMAGE, *WRONG_CONTENT):
            rows = self._connection.execute(query, (kind,)).fetchall()
            # One document, so that equal keys are stored once.
            values = json.loads(f"[{','.join(row[2] for row in rows)}]")
            return {
                run_id: Stamped(stamp, value)
                for (run_id, stamp, _), value in zip(rows, values, strict=True)
            }
        return {}

    def write_values(self, kind: str, values: Mapping[str, Stamped]) -> None:
        """Replace values of a kind. Nothing happens if the index cannot be written."""
        rows = [(kind, id_, v.stamp, json.dumps(v.value)) for id_, v in values.items()]
        if rows:
            with suppress(*_DAMAGE), self._connection as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(
                    "INSERT OR REPLACE INTO slow_values VALUES (?, ?, ?, ?)", rows
                )

    def _begin_anew(self) -> None:
        self._connection.close()
        path = self._home / INDEX_NAME
        with suppress(OSError):
            path.unlink()
        self._connection = _open(path)


def _open(path: Path) -> sqlite3.Connection:
    """Return a connection to a usable index: the file, a new file, or one in memory."""
    for _ in range(2):
        try:
            return _connect(path)
        except sqlite3.OperationalError:
            break  # Not readable, on a full disk, or locked for long: the file may be fine.
        except _DAMAGE:
            try:
                path.unlink()
            except OSError:
                break
    return _create(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))


def _connect(path: Path) -> sqlite3.Connection:
    """Raises ``DatabaseError`` if the file is damaged or of another version."""
    # The mode of the file is set before anything is in it.
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(
        path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
    )
    try:
        with closing(connection.execute("PRAGMA user_version")) as rows:
            (version,) = rows.fetchone()
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        if version == VERSION and {"runs", "heads", "slow_values"} <= tables:
            return connection
        if version or tables:
            raise sqlite3.DatabaseError(f"version {version}")
        return _create(connection)
    except BaseException:
        connection.close()
        raise


def _create(connection: sqlite3.Connection) -> sqlite3.Connection:
    # In one transaction, so that two processes that begin at once do not mix.
    connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    return connection


class _Row(Struct):
    """What the index holds of an entry. MessagePack can hold NaN, which JSON cannot."""

    summary: RunSummary | None
    problem: str | None
    labels: dict[str, Any] | None
    names: tuple[str, ...]


def _packed_row(entry: RunEntry) -> bytes:
    labels = None if entry.labels == NO_LABELS else entry.labels.to_document()
    return msgspec.msgpack.encode(_Row(entry.summary, entry.problem, labels, entry.metrics.names))
