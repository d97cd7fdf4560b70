"""Reading of files that may be anything: those of a run, which another person may have made. And
writing of small private ones, also in ranks.

A pipe would block for ever, a device has effects and no end, and a large file fills the memory. So
only regular files are opened, and only up to a size. Links are followed. What a file holds is
checked by its reader (``training/json_codec.py``).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 64 << 20
"""Maximum size of a file that is read as a whole. The largest one, the snapshot of a run with 1,024
ranks, has 2 MB."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. Raise ``OSError`` if that is not possible or it is no file."""
    # Opening a device may have an effect already, and opening a pipe waits for its writer.
    _check_regular(os.stat(path), path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def is_regular_or_absent(path: Path) -> bool:
    """Return True if the path names a regular file, also by a link, or nothing."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def read_regular(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raise ``OSError`` as ``open_regular``, and if it is larger."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        size = f"{most_bytes >> 20} MB" if most_bytes >> 20 else f"{most_bytes >> 10} kB"
        raise OSError(errno.EFBIG, f"it has more than {size}", os.fspath(path))
    return data


def read_end(path: str | os.PathLike[str], most_bytes: int) -> str:
    """Return the end of a text; an empty string if the file cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def write_private_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a private JSON file at once: a reader sees all of it or the file before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(json.dumps(document))  # much faster than json.dump
    part.replace(path)


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
