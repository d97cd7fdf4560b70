"""The log in a small app: following, searching, hostile text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.pilot import Pilot

from ltui.widgets import log_view
from ltui.widgets.log_view import LogLines, LogView
from ltui.widgets.sanitise import clean_line
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine


def lines(*texts: str, rank: int | None = 0) -> list[LogLine]:
    return [LogLine(rank=rank, text=t) for t in texts]


def numbered(begin: int, end: int) -> list[LogLine]:
    return lines(*(f"line {n}" for n in range(begin, end)))


@pytest.fixture(autouse=True)
def _few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_view, "MAX_LINES", 500)


class LogApp(App[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "left", "leave")]
    left = 0

    def compose(self) -> ComposeResult:
        yield LogView()

    def action_left(self) -> None:
        self.left += 1


class Log:
    """A log in an app that runs."""

    def __init__(self, pilot: Pilot[Any], app: LogApp) -> None:
        self.pilot, self.app, self.lines = pilot, app, app.query_one(LogLines)
        self.view = app.query_one(LogView)

    async def shown(self) -> list[str]:
        await self.pilot.pause()
        return [s.text.rstrip() for s in self.lines.render_lines(self.lines.size.region)]

    async def rows(self) -> list[str]:
        """Return the texts that are shown, without ranks."""
        return [row[5:] for row in await self.shown() if row]

    async def press(self, *keys: str) -> None:
        self.lines.focus()
        await self.pilot.press(*keys)

    async def scroll_to(self, **place: Any) -> None:
        self.lines.scroll_to(**place, animate=False)

    def hits(self) -> str:
        return str(self.app.query_one("#log-hits").render())


@asynccontextmanager
async def log_of(*held: LogLine, size: tuple[int, int] = (80, 12)) -> AsyncIterator[Log]:
    app = LogApp()
    async with app.run_test(size=size) as pilot:
        log = Log(pilot, app)
        log.lines.extend(held)
        await pilot.pause()
        yield log


async def test_follows_the_end_until_scrolled_up() -> None:
    async with log_of(*numbered(0, 100)) as log:
        assert (await log.shown())[-1].endswith("line 99")
        await log.press("pageup")
        await log.pilot.wait_for_animation()
        before = await log.shown()
        assert not log.lines.follow
        log.lines.extend(numbered(100, 200))
        assert await log.shown() == before
        await log.press("f")
        assert (await log.shown())[-1].endswith("line 199")
        assert log.lines.follow


async def test_the_readers_place_stays_when_old_lines_are_dropped() -> None:
    async with log_of(*numbered(0, 500)) as log:
        await log.scroll_to(y=250)
        before = await log.shown()
        assert before[0].endswith("line 250")
        log.lines.extend(numbered(500, 600))
        assert await log.shown() == before
        assert len(log.lines) == 500


async def test_search_finds_goes_round_and_leaves() -> None:
    async with log_of(*numbered(0, 300)) as log:
        await log.press("slash", *"LINE", "space", "1", "7")
        await log.pilot.pause()
        assert len(log.lines.hits()) == 11
        for key, line in (("enter", "line 179"), ("n", "line 17"), ("N", "line 179")):
            await log.pilot.press(key)
            assert any(row.endswith(line) for row in await log.shown())
        assert not log.lines.follow
        await log.pilot.press("escape")
        await log.pilot.pause()
        assert log.lines.query_text == ""
        assert log.app.left == 0
        await log.pilot.press("escape")
        assert log.app.left == 1
        await log.press("slash", "z", "enter", "n")
        await log.pilot.pause()
        assert "not found" in log.hits()


async def test_hostile_output_reaches_the_screen_as_plain_text() -> None:
    hostile = (
        "\x1b[2J\x1b]0;owned\x07[bold red]markup[/] [@click=app.quit]x[/] "
        "\x9b31m‮evil \U0001f468‍\U0001f469 日本"
    )
    shown = LogLine(rank=0, text=clean_line(hostile), tone=Tone.BAD)
    async with log_of(shown, size=(100, 12)) as log:
        rows = await log.shown()
        assert "[bold red]markup[/] [@click=app.quit]x[/]" in rows[0]
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in "".join(rows))
        for strip in log.lines.render_lines(log.lines.size.region):
            assert strip.cell_length == log.lines.size.width
            assert not any(segment.style and segment.style.meta for segment in strip)


async def test_a_log_opens_at_its_end_whatever_its_size_also_if_it_was_hidden() -> None:
    long = lines(*(f"{n} {'x' * 200}" for n in range(30)), "ValueError: bad")
    for held in (numbered(0, 30), long):
        async with log_of(size=(60, 12)) as log:
            log.view.display = False
            await log.pilot.pause()
            log.lines.set_lines(held)
            log.view.display = True
            assert (await log.shown())[-1].endswith(held[-1].text)
            log.lines.set_lines(held)
            for size in ((60, 12), (40, 6)):
                await log.pilot.resize_terminal(*size)
                assert (await log.shown())[-1].endswith(held[-1].text)
                assert log.lines.follow


async def test_long_lines_wrap_or_are_scrolled_beside_their_rank() -> None:
    async with log_of(*lines("x" * 200 + "END"), size=(60, 12)) as log:
        rows = [row for row in await log.shown() if row]
        assert len(rows) == 4
        assert rows[-1].endswith("END")
        assert [row[:5] for row in rows] == ["r0   ", *["     "] * 3]
        await log.press("w")
        assert "END" not in "".join(await log.shown())
        assert log.lines.scrollbar_size_horizontal == 0
        await log.scroll_to(x=500)
        rows = await log.shown()
        assert "END" in "".join(rows)
        assert rows[0].startswith("r0   x")
        await log.press("w")
        assert (await log.shown())[0].startswith("r0   x")


async def test_the_line_in_view_stays_when_the_width_changes() -> None:
    held = lines(*(f"line {n} {'x' * 80}" for n in range(100)))
    async with log_of(*held, size=(60, 12)) as log:
        log.lines.focus()
        await log.scroll_to(y=100)
        assert "line 50 " in (await log.shown())[0]
        await log.pilot.resize_terminal(30, 12)
        assert "line 50 " in (await log.shown())[0]
        assert not log.lines.follow


async def test_only_warnings_and_errors_or_only_errors_are_shown_and_searched() -> None:
    held = [
        LogLine(rank=0, text="all is well"),
        LogLine(rank=0, text="UserWarning: slow", tone=Tone.WARN),
        LogLine(rank=1, text="Traceback (most recent call last):", tone=Tone.BAD),
        LogLine(rank=1, text="  File 'train.py', line 3", in_traceback=True),
        LogLine(rank=1, text="ValueError: bad", tone=Tone.BAD),
    ]
    async with log_of(*held) as log:
        await log.press("L")
        assert await log.rows() == [line.text for line in held[1:]]
        log.lines.extend(lines("still well"))
        await log.press("L")
        assert await log.rows() == [line.text for line in held[2:]]
        await log.press("slash", *"e", "enter")
        await log.pilot.pause()
        assert "of 3" in log.hits()
        await log.pilot.press("escape")
        log.lines.set_lines(lines("all is well"))
        assert "no lines to show: errors only" in "".join(await log.shown())
        await log.press("L")
        assert (await log.shown())[0] == "r0   all is well"


async def test_arrival_times_are_shown_where_they_are_known_and_identical_lines_counted() -> None:
    at = 1_800_000_000.0
    retry = lines(*["NCCL WARN retry"] * 12)
    async with log_of(*lines("old"), LogLine(rank=0, text="new", seen_at=at), *retry) as log:
        assert (await log.shown())[1:3] == ["r0   new", "r0   NCCL WARN retry  ×12"]
        await log.press("T")
        rows = await log.shown()
        assert rows[0] == "     n/a r0   old"
        assert rows[1] == time.strftime("%H:%M:%S r0   new", time.localtime(at))


async def test_lines_stay_bounded_and_setting_them_anew_shows_those_alone() -> None:
    async with log_of() as log:
        for begin in range(0, 50_000, 1000):
            log.lines.extend(numbered(begin, begin + 1000))
        assert (await log.shown())[-1].endswith("line 49999")
        assert len(log.lines) == 500
        log.lines.set_lines(lines("only one", rank=3))
        assert [line for line in await log.shown() if line] == ["r3   only one"]
        assert log.lines.follow
        log.lines.set_lines([])
        assert "loading" in "".join(await log.shown())
