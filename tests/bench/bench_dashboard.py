"""The dashboard as a process on a terminal: first paint, memory, processor time."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.bench.bench_run import _ltui, torchrun

COLOURS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


@contextmanager
def _on_terminal(home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """``ltui`` on a terminal of 160 by 50 cells."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("ltui")), *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "LTUI_HOME": str(home), **COLOURS},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _drain(master: int, seconds: float, wanted: bytes = b"\0never") -> bool:
    """Reads what is painted for so long, or until ``wanted`` was painted."""
    seen, until = b"", time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([master], [], [], left)[0]:
            seen = (seen + os.read(master, 65536))[-200_000:]
            if wanted in seen:
                return True
    return False


def _first_paint() -> float:
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for _ in range(5):
            began = time.monotonic()
            with _on_terminal(Path(folder)) as (_, master):
                # The name of the shipped preset stands on the first screen.
                assert _drain(master, 10, b"quickstart"), "the first screen never came"
                times.append(time.monotonic() - began)
        return statistics.median(times)


def _watching() -> tuple[float, float]:
    """Processor share (%) and resident memory (MB) of a dashboard on a run of eight ranks."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _ltui(home, "exec", "--detach", "--", *torchrun(8), "100000", "0.1")
        try:
            with _on_terminal(home, "attach", "last") as (process, master):
                _drain(master, 60, b"r7")
                _drain(master, 8)
                watched = psutil.Process(process.pid)
                before = watched.cpu_times()
                _drain(master, 15)
                after = watched.cpu_times()
                used = after.user + after.system - before.user - before.system
                return used / 15 * 100, watched.memory_info().rss / 1e6
        finally:
            _ltui(home, "stop", "last", "--kill")


def measure() -> list[dict[str, Any]]:
    paint = _first_paint()
    cpu, memory = _watching()
    return [
        {"what": "ltui to first paint (median of 5)", "value": paint, "unit": "s", "bound": 0.5},
        {"what": "dashboard CPU at 4 Hz, 8 ranks", "value": cpu, "unit": "% of a core", "bound": 5},
        {"what": "dashboard resident memory, 8 ranks", "value": memory, "unit": "MB", "bound": 120},
    ]
