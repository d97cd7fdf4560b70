"""The dashboard as a process on a terminal: how it starts, its memory and its processor time."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ltui.training.config.preset_discovery import shipped_names
from tests.bench.bench_run import _ltui, torchrun
from tests.bench.row import Row, cpu_s, row
from tests.bench.terminal_process import COLUMNS, LINES, on_terminal, read_painted
from tests.bench.terminal_screen import TerminalScreen

LTUI = str(Path(sys.executable).with_name("ltui"))
STARTS = 7
FORM_FIELD = "learning rate"
"""A field of the form of the quickstart preset."""
DOWN = b"\x1b[B"
WARM_S, MEASURED_S = 10.0, 20.0
"""Seconds before processor time is measured, and seconds for which it is."""


def _start(key: bool) -> tuple[float, float]:
    """Seconds to the first screen, and to the answer of the first key or to the whole form."""
    first, second, *_ = shipped_names()
    screen = TerminalScreen(COLUMNS, LINES)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with on_terminal([LTUI], {"LTUI_HOME": folder}) as (_, master):
            shown = read_painted(
                master, 20, screen, lambda s: first in s.text() and second in s.text()
            )
            assert shown, "the first screen never came"
            first_screen_s = time.monotonic() - began
            plain = screen.background(second)
            assert screen.background(first) != plain, "no preset is selected on the first screen"
            if key:
                os.write(master, DOWN)
                # Colours differ once the list has the focus: compare with the row left behind.
                done = read_painted(
                    master,
                    20,
                    screen,
                    lambda s: s.background(first) == plain != s.background(second),
                )
            else:
                done = read_painted(master, 20, screen, lambda s: FORM_FIELD in s.text())
            assert done, "the key was never answered" if key else "the form never came"
            return first_screen_s, time.monotonic() - began


def _starting() -> list[Row]:
    keyed = [_start(key=True) for _ in range(STARTS)]
    whole = [_start(key=False) for _ in range(STARTS)]
    figures = {
        "ltui to the first screen": ([t[0] for t in keyed + whole], 0.5),
        "ltui to the answer of the first key": ([t[1] for t in keyed], 0.5),
        "ltui to the whole home screen": ([t[1] for t in whole], 0.8),
    }
    return [
        row(f"{what} (median of {len(times)})", statistics.median(times), "s", bound)
        for what, (times, bound) in figures.items()
    ]


def _cost(home: Path, *arguments: str, shows: str) -> tuple[float, float]:
    """Processor share (%) and resident memory (MB) of a dashboard that ``shows`` a text."""
    screen = TerminalScreen(COLUMNS, LINES)
    with on_terminal([LTUI, *arguments], {"LTUI_HOME": str(home)}) as (process, master):
        assert read_painted(master, 60, screen, lambda s: shows in s.text()), (
            f"never drawn: {shows}"
        )
        read_painted(master, WARM_S, screen)
        watched = psutil.Process(process.pid)
        before_s = cpu_s(watched)
        read_painted(master, MEASURED_S, screen)
        used = cpu_s(watched) - before_s
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


def measure() -> list[Row]:
    two, _, at_home = _watching(2)
    eight, memory, _ = _watching(8)
    core = "% of a core"
    return [
        *_starting(),
        row("dashboard CPU, live run, 2 ranks", two, core, 3),
        row("dashboard CPU, live run, 8 ranks", eight, core, 3),
        row("dashboard CPU, home", at_home, core, 1),
        row("dashboard resident memory, 8 ranks", memory, "MB", 120),
    ]
