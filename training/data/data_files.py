"""Files that presets generate or download: their folder, and their atomic creation.

A file appears complete or not at all.

A file is written under a temporary name in the same folder. Its writer holds a lock on it. By that
lock, the next writer of the file distinguishes the remains of a killed writer from a temporary file
that is still being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ltui.training.shared.checkpoint_files import fsync_folder

_SUFFIX = ".part"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file to write, and rename it to ``path`` at the end of the block.

    If the block raises, the temporary file is removed. Raises ``OSError``.
    """
    remove_abandoned(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
    lock = -1
    try:
        lock = _create_locked(part)
        yield part
        os.fsync(lock)
        os.replace(part, path)
        fsync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)
        if lock >= 0:
            os.close(lock)


def remove_abandoned(path: Path) -> None:
    """Remove temporary files of ``path`` that killed writers left."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # of another user, or in use
            descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)


def _create_locked(part: Path) -> int:
    """Create a temporary file and return its locked descriptor.

    Forked processes share the lock, which is held until the last of them exits.
    """
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Before it was locked, another writer may have removed it as abandoned.
        if part.exists():
            return descriptor
        os.close(descriptor)


def data_folder(folder: str | None = None) -> Path:
    """Return ``folder``, by default ``data`` in ltui's home. It is created if it does not exist."""
    path = Path(folder).expanduser() if folder else _default_folder()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _default_folder() -> Path:
    if home := os.environ.get("LTUI_HOME"):
        return Path(home) / "data"
    if run_dir := os.environ.get("LTUI_RUN_DIR"):
        return Path(run_dir).parent.parent / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltui" / "data"
