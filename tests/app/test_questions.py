"""Questions that end or remove something: which key answers them, and how soon."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from ltui.app.keys.ordered_input import HeldKey
from ltui.app.runs.run_rows import DEFAULT_LAYOUT
from ltui.app.screens.choosers import ColumnChooser, MetricChooser
from ltui.app.screens.dialog import ConfirmScreen
from ltui.app.screens.resume_or_rerun import RerunScreen
from ltui.app.screens.run import RunScreen
from ltui.app.screens.run_commands import InterruptScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.app.frames import frame, snapshot
from tests.app.one_run import OneRun, Script, answer, later, one_run, until


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = time.monotonic() + 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def on_a_clock() -> AsyncIterator[tuple[Pilot[Any], OneRun, Clock]]:
    """Yield pilot and app of a run, and the clock that the app has."""
    async with one_run(frame(), (100, 30)) as (pilot, app, _):
        app.clock = clock = Clock()
        yield pilot, app, clock


async def asked(pilot: Pilot[Any], key: str) -> ConfirmScreen:
    """Press a key and return the question that it opens."""
    await pilot.press(key)
    await until(pilot, lambda: isinstance(pilot.app.screen, ConfirmScreen))
    question = pilot.app.screen
    assert isinstance(question, ConfirmScreen)
    await until(pilot, lambda: question._opened_at < float("inf"))
    return question


@pytest.mark.parametrize(("key", "request_"), [("s", "stop"), ("k", "kill"), ("ctrl+c", "stop")])
async def test_y_alone_answers_and_not_within_half_a_second(key: str, request_: str) -> None:
    async with on_a_clock() as (pilot, app, clock):
        question = await asked(pilot, key)
        clock.now += 0.3
        await pilot.press("y")
        assert app.screen is question
        clock.now += 1.0
        await pilot.press("ctrl+p")
        clock.now += 0.4
        await pilot.press("y")
        assert app.screen is question
        assert app.asked == []
        clock.now += 1.0
        await pilot.press("y")
        await until(pilot, lambda: app.asked == [request_])


@pytest.mark.parametrize("other", ["k", "enter", "space", "a", "tab", "Y"])
async def test_every_key_that_is_no_answer_answers_no(other: str) -> None:
    async with one_run(frame(), (100, 30)) as (pilot, app, screen):
        await asked(pilot, "s")
        await pilot.press(other)
        assert app.screen is screen
        later(app)
        await pilot.press("y")
    assert app.asked == []


async def typed(pilot: Pilot[Any], clock: Clock, text: str, seconds: float) -> None:
    """Type a text with so many seconds between its keys."""
    for character in text:
        await pilot.press({" ": "space", ";": "semicolon", "\n": "enter"}.get(character, character))
        clock.now += seconds


async def test_a_sentence_that_was_meant_for_another_window_stops_nothing() -> None:
    async with on_a_clock() as (pilot, app, clock):
        await typed(pilot, clock, "loss is okay today", 0.15)
    assert app.asked == []


async def test_a_quick_q_after_ctrl_c_closes_ltui() -> None:
    async with on_a_clock() as (pilot, app, clock):
        await asked(pilot, "ctrl+c")
        clock.now += 0.1
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)
    assert app.asked == []


async def test_a_condition_to_stop_that_is_typed_at_once_schedules_nothing() -> None:
    async with on_a_clock() as (pilot, app, clock):
        await pilot.press("S")
        await until(pilot, lambda: isinstance(app.focused, Input))
        clock.now += 0.1
        await typed(pilot, clock, "1750\n", 0.1)
        assert app.asked == []
        clock.now += 1.0
        await pilot.press("enter")
        await until(pilot, lambda: app.asked == ["stop_when"])


async def test_a_click_soon_after_the_question_appeared_is_no_answer() -> None:
    async with on_a_clock() as (pilot, app, clock):
        question = await asked(pilot, "k")
        # Not by the pilot, whose clicks bypass the app.
        x, y = question.query_one("#answers").content_region.offset

        async def click() -> None:
            for kind in (events.MouseDown, events.MouseUp):
                app.post_message(kind(None, x, y, 0, 0, 1, False, False, False, x, y))
            await pilot.pause()

        await click()
        assert app.screen is question
        clock.now += 1.0
        await click()
        await until(pilot, lambda: app.asked == ["kill"])


async def test_a_held_key_asks_once_and_does_not_answer() -> None:
    async with on_a_clock() as (pilot, app, clock):

        async def hold(key: str) -> None:
            await pilot.press(key)
            clock.now += 0.6
            for _ in range(30):
                await pilot.press(key)
                clock.now += 0.04

        await hold("s")
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("n")
        clock.now += 5.0
        # What is typed too early does not answer because it is held long enough.
        await asked(pilot, "s")
        await hold("y")
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("n")
        clock.now += 5.0
        await hold("p")
        assert app.asked == ["pause"]


async def test_a_key_held_while_the_run_is_stopping_shows_one_notice() -> None:
    detail = "stopping: waiting for the ranks to stop together, 3 s of 60 s"
    stopping = frame(snapshot=snapshot(state=RunState.STOPPING, detail=detail))
    async with one_run(stopping, (100, 30), notifications=True) as (pilot, app, _):
        await pilot.press(*"ssss")
        assert [n.message for n in app._notifications] == [f"brave-owl: {detail}"]


def test_a_repeat_is_told_from_a_second_press() -> None:
    def repeats(*presses: tuple[str, float]) -> list[bool]:
        held = HeldKey()
        return [held.is_repeat(key, at) for key, at in presses]

    assert repeats(("s", 0.0), ("s", 0.65), ("s", 0.69), ("s", 0.73)) == [False, True, True, True]
    assert repeats(("s", 0.0), ("y", 0.1), ("s", 0.2)) == [False, False, False]
    assert repeats(("y", 0.0), ("y", 0.4), ("y", 0.8)) == [False, True, False]
    assert repeats(("s", 0.0), ("s", 0.9)) == [False, False]


@pytest.mark.parametrize("readonly", [False, True])
async def test_ctrl_c_asks_and_a_second_one_does_nothing(readonly: bool) -> None:
    async with one_run(frame(), (100, 30), readonly=readonly) as (pilot, app, _):
        await pilot.press("ctrl+c")
        if readonly:
            await until(pilot, lambda: not app.is_running)
            return
        await until(pilot, lambda: isinstance(app.screen, InterruptScreen))
        question = app.screen
        text = str(question.query_one("#answers", Static).content)
        assert "y stop it" in text
        assert "q close, training continues" in text
        later(app)
        await pilot.press("ctrl+c")
        assert app.screen is question
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await asked(pilot, "ctrl+c")
        await answer(pilot, "q")
        await until(pilot, lambda: not app.is_running)
    assert app.asked == []


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.STOPPED])
async def test_ctrl_c_quits_where_nothing_runs(state: RunState) -> None:
    async with one_run(frame(snapshot=snapshot(state=state)), (100, 30)) as (pilot, app, _):
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_ctrl_c_quits_at_home(private_home: Path) -> None:
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_ctrl_c_stops_nothing_that_is_stopping() -> None:
    stopping = frame(snapshot=snapshot(state=RunState.STOPPING))
    async with one_run(stopping, (100, 30)) as (pilot, app, _):
        question = await asked(pilot, "ctrl+c")
        later(app)
        await pilot.press("y")
        assert app.screen is question
        assert "stop it" not in str(question.query_one("#answers", Static).content)


async def test_several_pasted_lines_in_a_field_of_one_line_are_named() -> None:
    async with one_run(frame(), (100, 30), notifications=True) as (pilot, app, _):
        await pilot.press("S")
        await until(pilot, lambda: isinstance(app.focused, Input))
        app.post_message(events.Paste("500\n600\n700"))
        await until(pilot, lambda: [n.message for n in app._notifications])
        assert "first of 3 pasted lines" in next(iter(app._notifications)).message


async def test_enter_in_the_filter_of_a_chooser_goes_to_the_first_match() -> None:
    app = LtuiApp(Path("/nowhere"))
    async with app.run_test(size=(100, 30)) as pilot:
        for chooser in (
            ColumnChooser(DEFAULT_LAYOUT, {"val/loss"}),
            MetricChooser(["val/loss", "train/loss"], {}, []),
        ):
            app.push_screen(chooser)
            await until(pilot, lambda: bool(chooser.query("Input")) and app.screen is chooser)  # noqa: B023
            await pilot.press("slash", *"val", "enter")
            assert app.screen is chooser
            assert isinstance(app.focused, OptionList)
            later(app)
            await pilot.press("space", "enter")
            await until(pilot, lambda: app.screen is not chooser)  # noqa: B023


async def test_a_new_run_takes_the_place_of_the_run_it_was_started_from(
    private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (
        RunDir(private_home / "runs" / "old-1a2b"),
        RunDir(private_home / "runs" / "new-3c4d"),
    )
    monkeypatch.setattr(
        RerunScreen, "on_mount", lambda self: self.app.call_later(self.dismiss, new)
    )
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
        home = app.screen
        script = Script(frame(snapshot=snapshot(state=RunState.FINISHED)))
        screen = RunScreen(old, make_poller=lambda: script)
        app.push_screen(screen)
        await until(pilot, lambda: screen.frame is not None)
        await pilot.press("R")
        await until(pilot, lambda: getattr(app.screen, "run_dir", None) == new)
        await pilot.press("q")
        await until(pilot, lambda: app.screen is home)
