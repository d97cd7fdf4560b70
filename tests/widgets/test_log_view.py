"""The log in a small app: following, searching, hostile text."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

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

    @property
    def view(self) -> LogView:
        return self.query_one(LogView)


def shown(view: LogView) -> list[str]:
    return [s.text.rstrip() for s in view.lines.render_lines(view.lines.size.region)]


async def test_follows_the_end_until_scrolled_up() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend(numbered(0, 100))
        await pilot.pause()
        assert shown(app.view)[-1].endswith("line 99")
        app.view.lines.focus()
        await pilot.press("pageup")
        await pilot.wait_for_animation()
        await pilot.pause()
        assert not app.view.lines.follow
        before = shown(app.view)
        app.view.lines.extend(numbered(100, 200))
        await pilot.pause()
        assert shown(app.view) == before
        await pilot.press("f")
        await pilot.pause()
        assert app.view.lines.follow
        assert shown(app.view)[-1].endswith("line 199")


async def test_the_readers_place_stays_when_old_lines_are_dropped() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend(numbered(0, 500))
        await pilot.pause()
        app.view.lines.scroll_to(y=250, animate=False)
        await pilot.pause()
        before = shown(app.view)
        assert before[0].endswith("line 250")
        app.view.lines.extend(numbered(500, 600))
        await pilot.pause()
        assert len(app.view.lines) == 500
        assert shown(app.view) == before


async def test_identical_lines_are_counted() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend(lines(*["NCCL WARN retry"] * 12))
        await pilot.pause()
        assert shown(app.view)[0] == "r0   NCCL WARN retry  ×12"


async def test_search_finds_goes_round_and_leaves() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend(numbered(0, 300))
        await pilot.pause()
        app.view.lines.focus()
        await pilot.press("slash", *"LINE", "space", "1", "7")
        await pilot.pause()
        assert len(app.view.lines.hits()) == 11
        await pilot.press("enter")
        await pilot.pause()
        assert any(line.endswith("line 179") for line in shown(app.view))
        await pilot.press("n")
        await pilot.pause()
        assert any(line.endswith("line 17") for line in shown(app.view))
        await pilot.press("N")
        await pilot.pause()
        assert any(line.endswith("line 179") for line in shown(app.view))
        assert not app.view.lines.follow
        await pilot.press("escape")
        await pilot.pause()
        assert app.view.lines.query_text == ""
        assert app.left == 0
        await pilot.press("escape")
        assert app.left == 1


async def test_what_is_not_found_is_said() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend(numbered(0, 3))
        app.view.lines.focus()
        await pilot.press("slash", "z", "enter", "n")
        await pilot.pause()
        assert "not found" in str(app.query_one("#log-hits").render())


async def test_hostile_output_reaches_the_screen_as_plain_text() -> None:
    app = LogApp()
    hostile = (
        "\x1b[2J\x1b]0;owned\x07[bold red]markup[/] [@click=app.quit]x[/] "
        "\x9b31m‮evil \U0001f468‍\U0001f469 日本"
    )
    async with app.run_test(size=(100, 12)) as pilot:
        app.view.lines.extend([LogLine(rank=0, text=clean_line(hostile), tone=Tone.BAD)])
        await pilot.pause()
        first = shown(app.view)[0]
        assert "[bold red]markup[/] [@click=app.quit]x[/]" in first
        every = "".join(shown(app.view))
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in every)
        for strip in app.view.lines.render_lines(app.view.lines.size.region):
            assert strip.cell_length == app.view.lines.size.width
            assert not any(segment.style and segment.style.meta for segment in strip)


async def test_a_log_opens_at_its_end_whatever_its_size() -> None:
    long = lines(*(f"{n} {'x' * 200}" for n in range(30)), "ValueError: bad")
    for held in (numbered(0, 30), long):
        app = LogApp()
        async with app.run_test(size=(60, 12)) as pilot:
            app.view.lines.set_lines(held)
            await pilot.pause()
            assert shown(app.view)[-1].endswith(held[-1].text)
            await pilot.resize_terminal(40, 6)
            await pilot.pause()
            assert shown(app.view)[-1].endswith(held[-1].text)
            assert app.view.lines.follow


async def test_a_log_that_was_filled_while_hidden_opens_at_its_end() -> None:
    app = LogApp()
    async with app.run_test(size=(60, 12)) as pilot:
        app.view.display = False
        await pilot.pause()
        app.view.lines.set_lines(numbered(0, 30))
        app.view.display = True
        await pilot.pause()
        assert shown(app.view)[-1].endswith("line 29")


async def test_long_lines_wrap_or_are_scrolled_beside_their_rank() -> None:
    app = LogApp()
    async with app.run_test(size=(60, 12)) as pilot:
        app.view.lines.extend(lines("x" * 200 + "END"))
        await pilot.pause()
        rows = [row for row in shown(app.view) if row]
        assert len(rows) == 4
        assert rows[-1].endswith("END")
        assert [row[:5] for row in rows] == ["r0   ", *["     "] * 3]
        app.view.lines.focus()
        await pilot.press("w")
        await pilot.pause()
        assert "END" not in "".join(shown(app.view))
        assert app.view.lines.scrollbar_size_horizontal == 0
        app.view.lines.scroll_to(x=500, animate=False)
        await pilot.pause()
        assert "END" in "".join(shown(app.view))
        assert shown(app.view)[0].startswith("r0   x")
        await pilot.press("w")
        await pilot.pause()
        assert shown(app.view)[0].startswith("r0   x")


async def test_the_line_in_view_stays_when_the_width_changes() -> None:
    app = LogApp()
    async with app.run_test(size=(60, 12)) as pilot:
        app.view.lines.extend(lines(*(f"line {n} {'x' * 80}" for n in range(100))))
        await pilot.pause()
        app.view.lines.focus()
        app.view.lines.scroll_to(y=100, animate=False)
        await pilot.pause()
        assert "line 50 " in shown(app.view)[0]
        await pilot.resize_terminal(30, 12)
        await pilot.pause()
        assert "line 50 " in shown(app.view)[0]
        assert not app.view.lines.follow


async def test_only_warnings_and_errors_or_only_errors() -> None:
    app = LogApp()
    held = [
        LogLine(rank=0, text="all is well"),
        LogLine(rank=0, text="UserWarning: slow", tone=Tone.WARN),
        LogLine(rank=1, text="Traceback (most recent call last):", tone=Tone.BAD),
        LogLine(rank=1, text="  File 'train.py', line 3", in_traceback=True),
        LogLine(rank=1, text="ValueError: bad", tone=Tone.BAD),
    ]
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend(held)
        await pilot.pause()
        app.view.lines.focus()
        await pilot.press("L")
        await pilot.pause()
        assert [row[5:] for row in shown(app.view) if row] == [line.text for line in held[1:]]
        app.view.lines.extend(lines("still well"))
        await pilot.press("L")
        await pilot.pause()
        assert [row[5:] for row in shown(app.view) if row] == [line.text for line in held[2:]]
        app.view.lines.set_lines(lines("all is well"))
        await pilot.pause()
        assert "no lines to show: errors only" in "".join(shown(app.view))
        await pilot.press("L")
        await pilot.pause()
        assert shown(app.view)[0] == "r0   all is well"


async def test_a_search_finds_what_the_level_shows() -> None:
    app = LogApp()
    held = [
        LogLine(rank=0, text=f"batch {n}", tone=Tone.BAD if n == 9 else Tone.PLAIN)
        for n in range(40)
    ]
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend(held)
        app.view.lines.focus()
        await pilot.press("L", "L", "slash", *"batch", "enter")
        await pilot.pause()
        assert "1 of 1" in str(app.query_one("#log-hits").render())


async def test_arrival_times_are_shown_where_they_are_known() -> None:
    app = LogApp()
    at = 1_800_000_000.0
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.lines.extend([*lines("old"), LogLine(rank=0, text="new", seen_at=at)])
        await pilot.pause()
        assert shown(app.view)[1] == "r0   new"
        app.view.lines.focus()
        await pilot.press("T")
        await pilot.pause()
        assert shown(app.view)[0] == "     n/a r0   old"
        assert shown(app.view)[1] == time.strftime("%H:%M:%S r0   new", time.localtime(at))


async def test_setting_lines_anew_shows_those_alone() -> None:
    app = LogApp()
    async with app.run_test(size=(60, 12)) as pilot:
        app.view.lines.extend(numbered(0, 300))
        app.view.lines.set_lines(lines("only one", rank=3))
        await pilot.pause()
        assert [line for line in shown(app.view) if line] == ["r3   only one"]
        assert app.view.lines.follow
        app.view.lines.set_lines([])
        await pilot.pause()
        assert "loading" in "".join(shown(app.view))


async def test_tens_of_thousands_of_lines_stay_bounded() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        for begin in range(0, 50_000, 1000):
            app.view.lines.extend(numbered(begin, begin + 1000))
        await pilot.pause()
        assert len(app.query_one(LogLines)) == 500
        assert shown(app.view)[-1].endswith("line 49999")
