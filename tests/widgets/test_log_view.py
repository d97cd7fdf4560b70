"""The log in a small app: following, searching, hostile text."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from ltui.widgets.log_view import LogLines, LogView
from ltui.widgets.sanitise import clean_line
from ltui.widgets.shapes import LogLine, Tone


def lines(*texts: str, rank: int | None = 0) -> list[LogLine]:
    return [LogLine(rank=rank, text=t) for t in texts]


def numbered(begin: int, end: int) -> list[LogLine]:
    return lines(*(f"line {n}" for n in range(begin, end)))


class LogApp(App[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "left", "leave")]
    left = 0

    def compose(self) -> ComposeResult:
        yield LogView(max_lines=500)

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
        app.view.extend(numbered(0, 100))
        await pilot.pause()
        assert shown(app.view)[-1].endswith("line 99")
        app.view.lines.focus()
        await pilot.press("pageup")
        await pilot.wait_for_animation()
        await pilot.pause()
        assert not app.view.follow
        before = shown(app.view)
        app.view.extend(numbered(100, 200))
        await pilot.pause()
        assert shown(app.view) == before
        await pilot.press("f")
        await pilot.pause()
        assert app.view.follow
        assert shown(app.view)[-1].endswith("line 199")


async def test_the_readers_place_stays_when_old_lines_are_dropped() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.extend(numbered(0, 500))
        await pilot.pause()
        app.view.lines.scroll_to(y=250, animate=False)
        await pilot.pause()
        before = shown(app.view)
        assert before[0].endswith("line 250")
        app.view.extend(numbered(500, 600))
        await pilot.pause()
        assert len(app.view.lines) == 500
        assert shown(app.view) == before


async def test_identical_lines_are_counted() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.extend(lines(*["NCCL WARN retry"] * 12))
        await pilot.pause()
        assert shown(app.view)[0] == "r0   NCCL WARN retry  ×12"


async def test_search_finds_goes_round_and_leaves() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.extend(numbered(0, 300))
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
        assert not app.view.follow
        await pilot.press("escape")
        await pilot.pause()
        assert app.view.lines.query_text == ""
        assert app.left == 0
        await pilot.press("escape")
        assert app.left == 1


async def test_what_is_not_found_is_said() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        app.view.extend(numbered(0, 3))
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
        app.view.extend([LogLine(rank=0, text=clean_line(hostile), tone=Tone.BAD)])
        await pilot.pause()
        first = shown(app.view)[0]
        assert "[bold red]markup[/] [@click=app.quit]x[/]" in first
        every = "".join(shown(app.view))
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in every)
        for strip in app.view.lines.render_lines(app.view.lines.size.region):
            assert strip.cell_length == app.view.lines.size.width
            assert not any(segment.style and segment.style.meta for segment in strip)


async def test_a_long_line_is_reached_by_scrolling() -> None:
    app = LogApp()
    async with app.run_test(size=(60, 12)) as pilot:
        app.view.extend(lines("x" * 200 + "END"))
        await pilot.pause()
        assert "END" not in "".join(shown(app.view))
        app.view.lines.scroll_to(x=500, animate=False)
        await pilot.pause()
        assert "END" in "".join(shown(app.view))


async def test_setting_lines_anew_shows_those_alone() -> None:
    app = LogApp()
    async with app.run_test(size=(60, 12)) as pilot:
        app.view.extend(numbered(0, 300))
        app.view.set_lines(lines("only one", rank=3))
        await pilot.pause()
        assert [line for line in shown(app.view) if line] == ["r3   only one"]
        assert app.view.follow
        app.view.set_lines([])
        await pilot.pause()
        assert "nothing written yet" in "".join(shown(app.view))


async def test_tens_of_thousands_of_lines_stay_bounded() -> None:
    app = LogApp()
    async with app.run_test(size=(80, 12)) as pilot:
        for begin in range(0, 50_000, 1000):
            app.view.extend(numbered(begin, begin + 1000))
        await pilot.pause()
        assert len(app.query_one(LogLines)) == 500
        assert shown(app.view)[-1].endswith("line 49999")
