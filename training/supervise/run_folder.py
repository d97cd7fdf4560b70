"""The folder of a live run: limit its logs, warn before its disk is full, notice that it has moved.

A program writes its log itself and must never wait, so the log is not replaced. Its middle is
given back to the file system instead, and reads as a hole: the beginning and the end stay where
they were, for the program that appends and for everybody who reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ltui.training.state.run_snapshot import Event, FreezeWarning
from ltui.training.store.run_directory import RunDir

LIMIT_VARIABLE = "LTUI_LOG_LIMIT"
"""Environment variable with the largest size of one log: ``500M``, ``2G``, bytes, or ``none``."""
DEFAULT_LIMIT_BYTES = 1 << 30
LOW_SPACE_BYTES = 1 << 30
"""Free bytes on the disk of the run directory below which a warning is given."""
FULL_BYTES = 1 << 20
"""Free bytes below which a disk counts as full."""
SUPERVISOR_LOG_BYTES = 4 << 20
"""Size at which the supervisor's own log is cut to its last quarter."""
_CHECK_S = 2.0
_BLOCK = 1 << 16
"""Holes begin and end at multiples of this, which fits the blocks of every file system."""
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def log_limit(text: str | None) -> int | None:
    """Return the largest size of a log in bytes; None if there is no limit."""
    if not text:
        return DEFAULT_LIMIT_BYTES
    match = re.fullmatch(r"(\d{1,15})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        return None if text.strip().lower() == "none" else DEFAULT_LIMIT_BYTES
    return int(match[1]) * _UNITS[match[2].upper()] or None


def disk_is_full(folder: Path) -> bool:
    """Return True if nothing more can be written to the disk of ``folder``."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < FULL_BYTES
    return False


class LogLimit:
    """The logs of one attempt on this machine."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir, self._folder = run_dir, run_dir.logs_dir(attempt)
        self._limit = log_limit(os.environ.get(LIMIT_VARIABLE))
        self._check_at_s = 0.0
        self._reported: set[str] = set()
        self.warnings: tuple[FreezeWarning, ...] = ()
        """The disk is almost full."""

    def update(self, now_s: float) -> list[Event]:
        """Shorten what is too long. Return what a person has to know, each once."""
        if now_s < self._check_at_s:
            return []
        self._check_at_s = now_s + _CHECK_S
        texts: dict[str, str] = {}
        with contextlib.suppress(OSError):
            _cut_own_log(self._run_dir.supervisor_log_path)
            self.warnings = _low_space(self._run_dir.path)
            if self.warnings:
                texts["space"] = self.warnings[0].what
            if self._limit is not None:
                for path in self._folder.glob("*.log"):
                    texts |= self._shorten(path, self._limit)
        new = {key: text for key, text in texts.items() if key not in self._reported}
        self._reported |= new.keys()
        return [Event(time.time(), "disk", text, {}) for text in new.values()]

    def _shorten(self, path: Path, limit: int) -> dict[str, str]:
        """Remove the middle of a log. Return what to say about it."""
        status = path.stat()
        if status.st_blocks * 512 <= limit:
            return {}
        begin = _BLOCK * max(1, limit // 4 // _BLOCK)
        end = (status.st_size - limit // 2) // _BLOCK * _BLOCK
        problem = _punch_hole(path, begin, end - begin) if end > begin else None
        if problem is not None:
            return {path.name: f"{path.name} has {status.st_size / 1e9:.1f} GB, and this file "
                    f"system cannot shorten it ({problem})."}  # fmt: skip
        return {
            path.name: f"{path.name} has passed {limit / 1e6:.0f} MB ({LIMIT_VARIABLE}). Its first "
            "quarter and its end are kept, the rest is removed."
        }


def _low_space(folder: Path) -> tuple[FreezeWarning, ...]:
    free = shutil.disk_usage(folder).free
    if free >= LOW_SPACE_BYTES:
        return ()
    return (
        FreezeWarning(
            what=f"only {free / 1e6:.0f} MB are free on the disk of {folder}.",
            remedy="Make room: on a full disk no checkpoint is saved, and a program may die of "
            "what it prints.",
        ),
    )


def _punch_hole(path: Path, offset: int, length: int) -> str | None:
    """Give a part of a file back to the file system. Return why that failed, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        arguments = ctypes.c_int64(offset), ctypes.c_int64(length)
        if libc.fallocate64(descriptor, _PUNCH_HOLE, *arguments) == 0:
            return None
        return os.strerror(ctypes.get_errno())
    except AttributeError:  # another C library
        return "no fallocate"
    finally:
        os.close(descriptor)


def _cut_own_log(path: Path) -> None:
    """Cut the log that this process and the shim append to."""
    if not os.path.samestat(os.fstat(sys.stderr.fileno()), path.stat()):
        return  # a test, or a supervisor that was started by hand
    if path.stat().st_size > SUPERVISOR_LOG_BYTES:
        with path.open("r+b") as file:
            file.seek(-SUPERVISOR_LOG_BYTES // 4, os.SEEK_END)
            end = file.read().partition(b"\n")[2]
            file.truncate(0)
            file.seek(0)
            file.write(end)


class RunFolder:
    """The directory of the run that this process supervises."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._descriptor = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY)

    def leave_if_gone(self, kill_all: Callable[[], object]) -> None:
        """End this process if the directory is not at its path any more.

        If it was moved, the shim starts a supervisor at its new path. If it was removed, nobody
        could find the run again, so ``kill_all`` ends it.
        """
        try:
            os.stat(self._run_dir.spec_path)
        except FileNotFoundError:
            pass
        except OSError:  # a file system that does not answer at the moment
            return
        else:
            return
        folder = f"/proc/self/fd/{self._descriptor}"
        if os.path.exists(f"{folder}/spec.yaml"):
            where = f"moved to {os.readlink(folder)}; another supervisor continues there"
        else:
            where = "removed while the run was live, so the run is killed"
            kill_all()
        print(f"{self._run_dir.path} was {where}.", file=sys.stderr, flush=True)
        os._exit(1)  # as if it was killed: nothing may be written to the old path

    def close(self) -> None:
        os.close(self._descriptor)
