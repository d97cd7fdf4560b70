"""Files that appear whole or not at all.

A file grows under a temporary name beside its own. Its writer holds a lock on it, so that whoever
writes that file next can tell what a killed writer left from what another one is still writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ltui.training.rank.checkpoint_files import fsync_folder

_SUFFIX = ".part"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """An empty file to be written, which takes the name ``path`` once the block has ended well and
    is removed where it has not. Raises ``OSError``."""
    remove_abandoned(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
    lock = -1
    try:
        lock = _create(part)
        yield part
        os.fsync(lock)
        os.replace(part, path)
        fsync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)
        if lock >= 0:
            os.close(lock)


def remove_abandoned(path: Path) -> None:
    """Remove what writers of ``path`` left that were killed."""
    prefix = f".{path.name}."
    for entry in _entries(path.parent):
        if entry.name.startswith(prefix) and entry.name.endswith(_SUFFIX):
            with contextlib.suppress(OSError):  # somebody else's, or in use
                _remove_unlocked(entry)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # creating the file will say what is wrong
        return []


def _remove_unlocked(part: Path) -> None:
    descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()
    finally:
        os.close(descriptor)


def _create(part: Path) -> int:
    """Its descriptor, locked. Forked processes share the lock: it lasts as long as any of them."""
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Before it was locked, another writer may have taken it for abandoned.
        if part.exists():
            return descriptor
        os.close(descriptor)
