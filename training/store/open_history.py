"""Open the history of a run for writing, on the disk where it is safe to write it.

Used by supervisors only, which hold the run lock. If the history is on a local disk, a thread
copies it to the run directory from time to time, so that a slow or broken network file system
delays no tick of the supervisor. Each copy is consistent, and replaces the previous one as a whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ltui.training.process.identity import lock_holder
from ltui.training.store.database_schema import (
    damaged_error,
    find_damage,
    free_damaged_path,
    rename_damaged,
    store_error,
)
from ltui.training.store.history_place import (
    HistoryPlace,
    copied_at,
    folder_for_histories,
    new_folder,
    read_place,
    remove_folder,
    remove_unneeded_histories,
    write_place,
)
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_directory import RunDir, is_hard_linked

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
    mode = "mode=ro" if written else "mode=ro&immutable=1"
    return sqlite3.connect(f"{uri}?{mode}", uri=True, isolation_level=None, timeout=5.0)


def open_history(run_dir: RunDir) -> tuple[StoreWriter, str | None]:
    """Return the writer of the history, and what is missing from it now; None if nothing is.

    Raise ``StoreError`` if the history cannot be opened.
    """
    if run_dir.db_path.is_symlink() or is_hard_linked(run_dir.db_path):
        # The other directory, of which this one is a copy, keeps its history as it is.
        with contextlib.suppress(sqlite3.Error, OSError):  # damaged, which is found below
            copy_database(run_dir.db_path, run_dir.db_path)
        if run_dir.db_path.is_symlink():
            run_dir.db_path.unlink()
    place = read_place(run_dir)
    parent = folder_for_histories(run_dir)
    if place is None and parent is None:
        missing = _rename_if_damaged(run_dir)
        return _open(run_dir.db_path), missing
    try:
        return _open_with_copy(run_dir, place, parent)
    except (OSError, sqlite3.Error) as error:
        raise store_error(
            run_dir.db_path,
            f"the history cannot be copied ({getattr(error, 'strerror', None) or error}).",
            "Make room on the disks of this machine and of the run directory.",
        ) from error


def _open(path: Path) -> StoreWriter:
    try:
        return StoreWriter(path)
    except sqlite3.DatabaseError as error:
        raise damaged_error(path, error) from error


def _rename_if_damaged(run_dir: RunDir) -> str | None:
    """Rename a damaged history, so that the run continues with a new one. Return what is lost."""
    if find_damage(run_dir.db_path) is None:
        return None
    try:
        renamed = rename_damaged(run_dir.db_path)
    except OSError:
        return None  # Opening the store raises an error with the reason.
    return f"the history until now was damaged and is kept as {renamed.name}"


def _open_with_copy(
    run_dir: RunDir, place: HistoryPlace | None, parent: Path | None
) -> tuple[StoreWriter, str | None]:
    """Open a history that is, or was until now, in a folder of its own.

    ``parent`` is None if the run directory is good for it now.
    """
    folder, missing = _folder_here(run_dir, place)
    if folder is None:
        missing = _rename_if_damaged(run_dir) or missing
    if parent is None:
        _move_back(run_dir, folder)
        return _open(run_dir.db_path), missing
    remove_unneeded_histories()
    folder = folder or _copied_here(run_dir, parent)
    try:
        return CopiedHistory(run_dir, folder), missing
    except sqlite3.DatabaseError as error:
        raise damaged_error(folder / "run.db", error) from error


def _folder_here(run_dir: RunDir, place: HistoryPlace | None) -> tuple[Path | None, str | None]:
    """Return the folder of the history if it is on this machine, and what is lost otherwise."""
    if place is None or place.folder is None:
        return None, None
    since = copied_at(run_dir)
    if not place.is_here:
        return None, (
            f"the part after {since} stayed on {place.host}, except for what the queues of the "
            "ranks still held"
        )
    if find_damage(place.folder / "run.db") is None:
        return place.folder, None
    kept = free_damaged_path(run_dir.db_path)
    shutil.copyfile(place.folder / "run.db", kept)
    remove_folder(place.folder)
    return None, f"the part after {since} was damaged and is kept as {kept.name}"


def _move_back(run_dir: RunDir, folder: Path | None) -> None:
    """Make the run directory the place of the history again."""
    if folder is not None:
        copy_database(folder / "run.db", run_dir.db_path)
    run_dir.history_place_path.unlink(missing_ok=True)
    if folder is not None:
        remove_folder(folder)


def _copied_here(run_dir: RunDir, parent: Path) -> Path:
    """Return a new folder with the history as the run directory has it."""
    folder = new_folder(run_dir, parent)
    try:
        if run_dir.db_path.exists() and run_dir.db_path.stat().st_size:
            copy_database(run_dir.db_path, folder / "run.db")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
