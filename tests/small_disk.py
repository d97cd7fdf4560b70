"""Mounts for tests that need a disk of a known size, or one that can only be read."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest


def mount(*words: str) -> None:
    """Run ``mount``. Skip the test where that is not allowed, as in most containers."""
    if subprocess.run(["mount", *words], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")


def mount_small_disk(folder: Path, size_mb: int, most_files: int = 10_000) -> None:
    """Mount an empty disk at ``folder``."""
    folder.mkdir()
    options = f"size={size_mb}m,nr_inodes={most_files},mode=0700"
    mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Write a file that leaves no byte of the disk. Deleting it makes room again."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast
