"""Folders that only their owner can read: for runs, sockets, keys and histories.

``Path.mkdir(mode=0o700, parents=True)`` gives the mode to the last folder only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ltui.training.problem import ProblemError


def make_private_folders(folder: Path) -> None:
    """Create ``folder`` and its missing parents with mode 0700. Raises ``OSError``.

    A folder that exists stays as it is.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private_folders(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def private_folder(folder: Path, remedy: str = "Remove it, or set TMPDIR.") -> Path:
    """Return a folder of ltui's own that only this user can read; create it if absent.

    A folder of this user that is open to others is closed: older versions left such folders.
    Raise ``ProblemError`` with ``remedy`` if somebody else has it, or if it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink():
            raise _unusable(folder, "it is a link", remedy)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid():
                raise _unusable(folder, "it belongs to another user", remedy)
            if status.st_mode & 0o022 and _has_files_of_others(descriptor):
                raise _unusable(folder, "another user has put files into it", remedy)
            if status.st_mode & 0o077:
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~0o077)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error), remedy) from error
    return folder


def _has_files_of_others(descriptor: int) -> bool:
    with os.scandir(descriptor) as entries:
        return any(entry.stat(follow_symlinks=False).st_uid != os.getuid() for entry in entries)


def _unusable(folder: Path, reason: str, remedy: str) -> ProblemError:
    return ProblemError.of(
        where=str(folder), what=f"this folder cannot be used: {reason}.", remedy=remedy
    )
