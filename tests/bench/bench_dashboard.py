"""The dashboard as a process on a terminal: how it starts, its memory and its processor time."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ltui.training.config.preset_discovery import shipped_names
from tests.bench.bench_run import _ltui, torchrun
from tests.bench.terminal_screen import TerminalScreen

COLUMNS, LINES = 160, 50
COLOURS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
STARTS = 7
FORM_FIELD = "learning rate"
"""A field of the form of the quickstart preset."""
DOWN = b"\x1b[B"
WARM_S, MEASURED_S = 10.0, 20.0
"""Seconds before processor time is measured, and seconds for which it is."""


@contextmanager
def _on_terminal(home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """``ltui`` on a terminal of 160 by 50 cells."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
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


def _read(
    master: int,
    seconds: float,
    screen: TerminalScreen,
    done: Callable[[TerminalScreen], object] = lambda _: False,
) -> bool:
    """Read what is painted for so long, or until ``done``."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([master], [], [], left)[0]:
            screen.feed(os.read(master, 65536))
            if done(screen):
                return True
    return False


def _start(key: bool) -> tuple[float, float]:
    """Seconds to the first screen, and to the answer of the first key or to the whole form."""
    first, second, *_ = shipped_names()
    screen = TerminalScreen(COLUMNS, LINES)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with _on_terminal(Path(folder)) as (_, master):
            shown = _read(master, 20, screen, lambda s: first in s.text() and second in s.text())
            assert shown, "the first screen never came"
            first_screen_s = time.monotonic() - began
            plain = screen.background(second)
            assert screen.background(first) != plain, "no preset is selected on the first screen"
            if key:
                os.write(master, DOWN)
                # Colours differ once the list has the focus: compare with the row left behind.
                done = _read(
                    master,
                    20,
                    screen,
                    lambda s: s.background(first) == plain != s.background(second),
                )
            else:
                done = _read(master, 20, screen, lambda s: FORM_FIELD in s.text())
            assert done, "the key was never answered" if key else "the form never came"
            return first_screen_s, time.monotonic() - began


def _starting() -> list[dict[str, Any]]:
    keyed = [_start(key=True) for _ in range(STARTS)]
    whole = [_start(key=False) for _ in range(STARTS)]
    figures = {
        "ltui to the first screen": ([t[0] for t in keyed + whole], 0.5),
        "ltui to the answer of the first key": ([t[1] for t in keyed], 0.5),
        "ltui to the whole home screen": ([t[1] for t in whole], 0.8),
    }
    return [
        {
            "what": f"{what} (median of {len(times)})",
            "value": statistics.median(times),
            "unit": "s",
            "bound": bound,
        }
        for what, (times, bound) in figures.items()
    ]


def _cost(home: Path, *arguments: str, shows: str) -> tuple[float, float]:
    """Processor share (%) and resident memory (MB) of a dashboard that ``shows`` a text."""
    screen = TerminalScreen(COLUMNS, LINES)
    with _on_terminal(home, *arguments) as (process, master):
        assert _read(master, 60, screen, lambda s: shows in s.text()), f"never drawn: {shows}"
        _read(master, WARM_S, screen)
        watched = psutil.Process(process.pid)
        before = watched.cpu_times()
        _read(master, MEASURED_S, screen)
        after = watched.cpu_times()
        used = after.user + after.system - before.user - before.system
        return used / MEASURED_S * 100, watched.memory_info().rss / 1e6


def _watching(ranks: int) -> tuple[float, float, float]:
    """The cost of a run's screen with charts, and the processor share of home meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _ltui(home, "exec", "--detach", "--", *torchrun(ranks), "100000", "0.1")
        try:
            cpu, memory = _cost(home, "attach", "last", shows=f"r{ranks - 1}")
            at_home, _ = _cost(home, shows="running")
            return cpu, memory, at_home
        finally:
            _ltui(home, "stop", "last", "--kill")


def measure() -> list[dict[str, Any]]:
    two, _, at_home = _watching(2)
    eight, memory, _ = _watching(8)
    core = "% of a core"
    return [
        *_starting(),
        {"what": "dashboard CPU, live run, 2 ranks", "value": two, "unit": core, "bound": 3},
        {"what": "dashboard CPU, live run, 8 ranks", "value": eight, "unit": core, "bound": 3},
        {"what": "dashboard CPU, home", "value": at_home, "unit": core, "bound": 1},
        {"what": "dashboard resident memory, 8 ranks", "value": memory, "unit": "MB", "bound": 120},
    ]
