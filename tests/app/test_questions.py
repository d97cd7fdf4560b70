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

from ltui.app.keys.ordered_input import HeldKey, OrderedKeysApp
from ltui.app.runs.run_rows import DEFAULT_LAYOUT
from ltui.app.screens.choosers import ColumnChooser, MetricChooser
from ltui.app.screens.dialog import ConfirmScreen, CountQuestion
from ltui.app.screens.resume_or_run_again import RunAgainScreen
from ltui.app.screens.run import RunScreen
from ltui.app.screens.run_commands import InterruptScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.app.frames import frame, snapshot
from tests.app.one_run import OneRun, Script, later, noticed, notices, one_run, reached, until

SMALL = (100, 30)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = time.monotonic() + 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def on_a_clock() -> AsyncIterator[tuple[Pilot[Any], OneRun, Clock]]:
    """Yield pilot and app of a run, and the clock that the app has."""
    async with one_run(frame(), SMALL) as (pilot, app, _):
        app.clock = clock = Clock()
        yield pilot, app, clock


async def asked(pilot: Pilot[Any], key: str) -> ConfirmScreen:
    """Press a key and return the question that it opens."""
    await pilot.press(key)
    question = await reached(pilot, ConfirmScreen)
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


async def test_every_key_that_is_no_answer_answers_no() -> None:
    async with one_run(frame(), SMALL) as (pilot, app, screen):
        for other in ("k", "enter", "space", "a", "tab", "Y"):
            later(app, 5.0)
            await asked(pilot, "s")
            await pilot.press(other)
            assert app.screen is screen, other
            later(app)
            await pilot.press("y")
    assert app.asked == []


@pytest.mark.parametrize(
    ("pause", "keys", "answer"),
    [
        (1.0, "3\n", True),
        (0.1, "3\n", None),  # Typed at once.
        (1.0, "4\n", False),
        (1.0, "33\b\n", True),
        (1.0, "y", False),
        (1.0, "3y", True),
        (1.0, "\n", False),
    ],
)
async def test_a_question_about_several_things_takes_their_number_alone(
    pause: float, keys: str, answer: bool | None
) -> None:
    app = OrderedKeysApp()
    app.clock = clock = Clock()
    answers: list[bool | None] = []
    async with app.run_test(size=SMALL) as pilot:
        question = CountQuestion("Delete 3 runs?", 3, yes="delete them")
        app.push_screen(question, answers.append)
        await until(pilot, lambda: question._opened_at == clock.now)
        clock.now += pause
        await typed(pilot, clock, keys, 0.1)
        if answer is None:
            assert app.screen is question
        else:
            await until(pilot, lambda: answers == [answer])


async def typed(pilot: Pilot[Any], clock: Clock, text: str, seconds: float) -> None:
    """Type a text with so many seconds between its keys."""
    names = {" ": "space", ";": "semicolon", "\n": "enter", "\b": "backspace"}
    for character in text:
        await pilot.press(names.get(character, character))
        clock.now += seconds


async def test_a_sentence_that_was_meant_for_another_window_stops_nothing() -> None:
    async with on_a_clock() as (pilot, app, clock):
        await typed(pilot, clock, "loss is okay today", 0.15)
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
            await typed(pilot, clock, key * 30, 0.04)

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


def test_a_repeat_is_told_from_a_second_press() -> None:
    def repeats(*presses: tuple[str, float]) -> list[bool]:
        held = HeldKey()
        return [held.is_repeat(key, at) for key, at in presses]

    assert repeats(("s", 0.0), ("s", 0.65), ("s", 0.69), ("s", 0.73)) == [False, True, True, True]
    assert repeats(("s", 0.0), ("y", 0.1), ("s", 0.2)) == [False, False, False]
    assert repeats(("y", 0.0), ("y", 0.4), ("y", 0.8)) == [False, True, False]
    assert repeats(("s", 0.0), ("s", 0.9)) == [False, False]


async def test_ctrl_c_asks_and_a_second_one_does_nothing() -> None:
    async with one_run(frame(), SMALL) as (pilot, app, _):
        await pilot.press("ctrl+c")
        question = await reached(pilot, InterruptScreen)
        text = str(question.query_one("#answers", Static).content)
        assert "y stop it" in text
        assert "q close, training continues" in text
        later(app)
        await pilot.press("ctrl+c")
        assert app.screen is question
        await pilot.press("escape")
        await reached(pilot, RunScreen)
        await asked(pilot, "ctrl+c")
        # A quick q closes.
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)
    assert app.asked == []


@pytest.mark.parametrize("at", [RunState.FINISHED, RunState.STOPPED, "readonly", "home"])
async def test_ctrl_c_quits_where_nothing_runs_or_nothing_can_be_stopped(
    private_home: Path, at: RunState | str
) -> None:
    state = at if isinstance(at, RunState) else RunState.RUNNING
    run = OneRun(Script(frame(snapshot=snapshot(state=state))), readonly=at == "readonly")
    app = LtuiApp(private_home) if at == "home" else run
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: app is not run or run.run_screen.frame is not None)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_nothing_that_is_stopping_is_stopped_again() -> None:
    detail = "stopping: waiting for the ranks to stop together, 3 s of 60 s"
    stopping = frame(snapshot=snapshot(state=RunState.STOPPING, detail=detail))
    async with one_run(stopping, SMALL, notifications=True) as (pilot, app, _):
        # A held key shows one notice.
        await pilot.press(*"ssss")
        assert notices(app) == [f"brave-owl: {detail}"]
        question = await asked(pilot, "ctrl+c")
        later(app)
        await pilot.press("y")
        assert app.screen is question
        assert "stop it" not in str(question.query_one("#answers", Static).content)


async def test_several_pasted_lines_in_a_field_of_one_line_are_named() -> None:
    async with one_run(frame(), SMALL, notifications=True) as (pilot, app, _):
        await pilot.press("S")
        await until(pilot, lambda: isinstance(app.focused, Input))
        app.post_message(events.Paste("500\n600\n700"))
        await noticed(pilot, app, "first of 3 pasted lines")


async def test_enter_in_the_filter_of_a_chooser_goes_to_the_first_match() -> None:
    app = LtuiApp(Path("/nowhere"))
    async with app.run_test(size=SMALL) as pilot:
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
    old, new = (RunDir(private_home / "runs" / name) for name in ("old-1a2b", "new-3c4d"))
    monkeypatch.setattr(
        RunAgainScreen, "on_mount", lambda self: self.app.call_later(self.dismiss, new)
    )
    app = LtuiApp(private_home)
    async with app.run_test(size=SMALL) as pilot:
        home = app.screen
        script = Script(frame(snapshot=snapshot(state=RunState.FINISHED)))
        screen = RunScreen(old, make_poller=lambda: script)
        app.push_screen(screen)
        await until(pilot, lambda: screen.frame is not None)
        await pilot.press("R")
        await until(pilot, lambda: getattr(app.screen, "run_dir", None) == new)
        await pilot.press("q")
        await until(pilot, lambda: app.screen is home)
