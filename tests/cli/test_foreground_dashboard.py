"""The dashboard that ``ltui run`` opens on a terminal: Ctrl-C, its end, and what follows it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ltui.app.foreground.follow_run import can_open_dashboard
from ltui.app.foreground.run_in_dashboard import ForegroundApp
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.cli.conftest import Ltui
from tests.cli.terminal import Terminal
from tests.ltui_command import LTUI
from tests.store.histories import begin, run_dir, snapshot

ALTERNATE_SCREEN = "\x1b[?1049h"


def ended_run(folder: Path) -> RunDir:
    found = run_dir(folder)
    store = StoreWriter(found.db_path)
    begin(store)
    store.write_snapshot(snapshot(state=RunState.FINISHED, detail="finished at step 3"))
    store.close()
    return found


class Opened:
    """The application over a run that has ended, with the requests that it sent."""

    def __init__(self, folder: Path, close_after_s: float) -> None:
        self.requests: list[dict[str, Any]] = []
        self.signals = ReceivedSignals()
        self.app = ForegroundApp(
            ended_run(folder),
            self.signals,
            request=lambda _, request: self.requests.append(request),
            close_after_s=close_after_s,
        )

    async def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    @property
    def closed(self) -> bool:
        return not self.app.is_running


async def test_a_signal_of_a_launcher_stops_and_a_persons_signal_does_not(tmp_path: Path) -> None:
    opened = Opened(tmp_path, close_after_s=1000)
    async with opened.app.run_test():
        opened.signals._interrupt()
        await opened.until(lambda: opened.signals.interrupts == 0)
        # The run has ended, so there is nothing to ask.
        await opened.until(lambda: opened.closed)
        assert opened.requests == []
    opened = Opened(tmp_path / "launched", close_after_s=1000)
    async with opened.app.run_test():
        opened.signals._stop()
        await opened.until(lambda: bool(opened.requests))
        assert opened.requests[0]["cmd"] == "stop"
        opened.signals.leave = signal.SIGTERM
        await opened.until(lambda: opened.closed)


async def test_it_closes_when_the_run_has_ended(tmp_path: Path) -> None:
    opened = Opened(tmp_path, close_after_s=0.5)
    async with opened.app.run_test():
        await opened.until(lambda: opened.closed)


async def test_a_key_keeps_it_open_after_the_end(tmp_path: Path) -> None:
    opened = Opened(tmp_path, close_after_s=1000)
    async with opened.app.run_test() as pilot:
        await opened.until(lambda: opened.app._closes_at is not None)
        await pilot.press("x")
        await opened.until(lambda: opened.app._closes_at == float("inf"))
        await pilot.press("q")
        await opened.until(lambda: opened.closed)


def test_a_dumb_terminal_has_no_dashboard() -> None:
    assert not can_open_dashboard({"TERM": "dumb"})
    assert not can_open_dashboard({})


@pytest.fixture
def terminal(tmp_path: Path, ltui: Ltui) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*words: str) -> Terminal:
        argv = [*LTUI, *words]
        opened.append(Terminal(argv, tmp_path, os.environ))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()
    ltui("stop", "last", "--kill")


def test_a_run_on_a_terminal_opens_the_dashboard_and_leaving_it_leaves_the_run(
    ltui: Ltui, terminal: Callable[..., Terminal]
) -> None:
    shown = terminal("exec", "--", "sleep", "600")
    shown.wait_for(ALTERNATE_SCREEN)
    assert "started. To watch it: ltui attach" in shown.drawn.split(ALTERNATE_SCREEN)[0]
    shown.wait_for("sleep 600")
    shown.press("q")
    assert shown.wait() == 0
    assert "keeps running. To watch it: ltui attach" in shown.drawn
    listed = ltui("runs").stdout
    assert "running" in listed or "starting" in listed


def test_ctrl_c_in_the_dashboard_asks_before_it_stops_the_run(
    terminal: Callable[..., Terminal],
) -> None:
    shown = terminal("exec", "--", "sleep", "600")
    shown.wait_for(ALTERNATE_SCREEN)
    shown.wait_for("sleep 600")
    shown.press("\x03")
    shown.wait_for("close, training continues")
    shown.press("\x03")
    time.sleep(1.0)  # a question accepts no answer in its first half second
    shown.press("y")
    shown.wait_for("The run has ended")
    shown.press("q")  # by itself it closes after ten seconds
    assert shown.wait() == 1
    assert "ltui logs" in shown.drawn or "stopped" in shown.drawn


def test_plain_prints_lines_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    shown = terminal("exec", "--plain", "--", "sleep", "1")
    assert shown.wait() == 0
    assert ALTERNATE_SCREEN not in shown.drawn
    assert "started. To watch it: ltui attach" in shown.drawn
