"""Disk use of a run directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, on every file system."""


def disk_use(folder: Path) -> int:
    """Return the bytes that a folder occupies on its disk.

    A file with several names in the folder counts once, and links are not followed. What cannot be
    read, or disappears meanwhile, counts as nothing.
    """
    total, seen, folders = 0, set(), [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                        if (status.st_dev, status.st_ino) in seen:
                            continue
                        seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * _BLOCK_BYTES
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
        except OSError:
            continue
    return total
