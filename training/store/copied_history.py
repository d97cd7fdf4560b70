"""A history on a local disk, of which a copy goes to the run directory from time to time.

A thread copies it, so that a slow or broken network file system delays no tick of the supervisor.
Each copy is consistent, and replaces the previous one as a whole.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ltui.training.process.identity import lock_holder
from ltui.training.store.history_place import read_place, remove_folder, write_place
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_directory import RunDir

INTERVAL_VARIABLE = "LTUI_HISTORY_COPY_S"
COPY_EVERY_S = 30.0
"""Seconds between two copies."""
FIRST_COPY_S = 1.0
"""Seconds until the first copy, so that the engine of the run is started first."""
COST = 0.01
"""Highest part of the time that is spent on copying."""
ALIVE_EVERY_S = 15.0
"""Seconds between two signs of life (``HistoryPlace.alive_at``)."""
LAST_COPY_S = 120.0
"""Seconds to wait for the last copy. After that the history stays where it is."""
_PAGES = 256
"""Pages that are copied at once."""
_JOURNAL_FORMAT = 18
"""Offset of two bytes in the header of a database: 2 means WAL, 1 a rollback journal."""


class CopiedHistory(StoreWriter):
    """The only writer of a history that is on a local disk."""

    def __init__(self, run_dir: RunDir, folder: Path) -> None:
        """``folder`` is that of ``history.json``."""
        super().__init__(folder / "run.db")
        write_place(run_dir, folder)
        self._run_dir, self._folder = run_dir, folder
        self._closing = threading.Event()
        self._given_up = False
        """True if the last copy took too long, so that it must not replace a later one."""
        self._complete = False
        self._failure: str | None = None
        self._failing_since = 0.0
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ltui-history-copy", daemon=True)
        self._thread.start()

    @property
    def copy_note(self) -> str | None:
        if self._failure is None:
            return None
        clock = time.strftime("%H:%M", time.localtime(self._failing_since))
        return f"not copied to the run directory since {clock} ({self._failure})"

    def close(self) -> None:
        """Close the history and copy it a last time. It is removed here if that has worked."""
        super().close()
        self._closing.set()
        self._thread.join(LAST_COPY_S)
        self._given_up = self._thread.is_alive()
        if self._complete:
            remove_folder(self._folder)

    def _run(self) -> None:
        copy_at = time.monotonic() + FIRST_COPY_S
        while not self._closing.wait(min(ALIVE_EVERY_S, max(0.0, copy_at - time.monotonic()))):
            self._show_alive()
            if (begun := time.monotonic()) >= copy_at:
                self._copy()
                cost_s = time.monotonic() - begun
                copy_at = time.monotonic() + max(copy_interval_s(), cost_s / COST)
        if self._copy():
            with contextlib.suppress(OSError):
                write_place(self._run_dir, None)
                self._complete = True

    def _copy(self) -> bool:
        """Copy the history. Return True if that has worked."""
        if not self._is_ours():
            return False
        try:
            copy_database(
                self._folder / "run.db",
                self._run_dir.db_path,
                between_parts=self._show_alive,
                may_replace=self._is_ours,
            )
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
            return False
        self._failure = None
        return True

    def _is_ours(self) -> bool:
        """Return True unless the run was continued elsewhere, from a copy made before."""
        if self._given_up:
            return False
        place = read_place(self._run_dir)
        return place is not None and place.folder == self._folder

    def _fail(self, error: OSError | sqlite3.Error) -> None:
        text = str(getattr(error, "strerror", None) or error)
        text = "disk full" if "full" in text or "No space" in text else text
        if self._failure is None:
            self._failing_since = time.time()
            with contextlib.suppress(OSError):  # the log may be on the same full disk
                print(f"the history cannot be copied: {error}", file=sys.stderr, flush=True)
        self._failure = text

    def _show_alive(self) -> None:
        if time.monotonic() - self._alive_at < ALIVE_EVERY_S:
            return
        self._alive_at = time.monotonic()
        with contextlib.suppress(OSError):
            if self._is_ours():
                os.utime(self._run_dir.history_place_path)


def wait_for_last_copy(run_dir: RunDir) -> None:
    """Wait until the supervisor of a run that has ended has copied the history, or has ended.

    Return at once if the history is in the run directory. Whoever lets a job end calls this,
    because the scheduler kills the processes that are left.
    """
    deadline = time.monotonic() + LAST_COPY_S
    while time.monotonic() < deadline:
        place = read_place(run_dir)
        if place is None or place.folder is None or lock_holder(run_dir.lock_path) is None:
            return
        time.sleep(0.1)


def copy_interval_s() -> float:
    """Return ``LTUI_HISTORY_COPY_S``, or ``COPY_EVERY_S`` unless it is a positive number."""
    try:
        seconds = float(os.environ.get(INTERVAL_VARIABLE, ""))
    except ValueError:
        return COPY_EVERY_S
    return seconds if seconds > 0 else COPY_EVERY_S


def copy_database(
    source: Path,
    target: Path,
    *,
    between_parts: Callable[[], None] = lambda: None,
    may_replace: Callable[[], bool] = lambda: True,
) -> None:
    """Replace ``target`` by a consistent copy of ``source``, which may be written meanwhile.

    The copy needs no lock, no shared memory and no journal to be read. Raise ``OSError`` or
    ``sqlite3.Error`` if that fails; ``target`` is then what it was.
    """
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        # Nobody else has this file, so it needs no locks, which may not work in its folder.
        with (
            closing(sqlite3.connect(f"{part.absolute().as_uri()}?vfs=unix-none", uri=True)) as copy,
            closing(_open_source(source)) as connection,
        ):
            copy.execute("PRAGMA journal_mode = OFF")
            copy.execute("PRAGMA synchronous = OFF")
            # One read transaction, so that no change of the writer begins the copy anew.
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            connection.backup(copy, pages=_PAGES, progress=lambda *_: between_parts())
        with part.open("r+b") as file:
            file.seek(_JOURNAL_FORMAT)
            file.write(b"\x01\x01")
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o600)
        if may_replace():
            # They belong to a database that was written here before. The copy has what they hold.
            for suffix in ("-wal", "-shm"):
                target.with_name(target.name + suffix).unlink(missing_ok=True)
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _open_source(source: Path) -> sqlite3.Connection:
    """Open a database to read it. A copy, which nobody writes, is opened without locks."""
    uri = source.absolute().as_uri()
    written = source.with_name(f"{source.name}-wal").exists()
    mode = "mode=ro" if written else "immutable=1"
    return sqlite3.connect(f"{uri}?{mode}", uri=True, isolation_level=None, timeout=5.0)
