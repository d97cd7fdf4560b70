"""Open the history of a run for writing, on the disk where it is safe to write it.

Used by supervisors only, which hold the run lock.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

from ltui.training.store.copied_history import CopiedHistory, copy_database
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
)
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_directory import RunDir, is_hard_linked


def open_history(run_dir: RunDir) -> tuple[StoreWriter, str | None]:
    """Return the writer of the history, and what is missing from it now; None if nothing is.

    Raise ``StoreError`` if the history cannot be opened.
    """
    if is_hard_linked(run_dir.db_path):
        # The other directory, of which this one is a copy, keeps its history as it is.
        with contextlib.suppress(sqlite3.Error):  # damaged, which is found below
            copy_database(run_dir.db_path, run_dir.db_path)
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
