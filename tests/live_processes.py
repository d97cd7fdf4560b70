"""Processes that a test started, wherever they are by now: found by their environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def processes_with(
    variable: str, value: object, *, word: str | None = None
) -> list[psutil.Process]:
    """Return the processes that have the variable, zombies excepted.

    ``word``: also those whose command line contains it.
    """
    entry = f"{variable}={value}".encode()
    alive = []
    for process in psutil.process_iter():
        try:
            wanted = (word is not None and word in " ".join(process.cmdline())) or (
                entry in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            )
            if wanted and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except (OSError, psutil.Error):
            continue
    return alive


def wait_until_gone(left: Callable[[], list[psutil.Process]], seconds: float = 90) -> None:
    """Wait until ``left`` returns no process. Fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while remaining := left():
        assert time.monotonic() < deadline, f"still running: {[p.cmdline() for p in remaining]}"
        time.sleep(0.05)
