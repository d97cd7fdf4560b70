"""The run screen driven by keys, on constructed frames."""

from __future__ import annotations

import re
import threading
from typing import Any

from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.live.frame import Frame
from ltui.app.panels.movable_borders import DETAILS, PANELS, PanelLayout
from ltui.app.panels.panel import TabBar
from ltui.app.panels.run_charts import RunCharts
from ltui.app.panels.run_panels import DetailsView, table_lines
from ltui.app.presentation.notifications import still_live
from ltui.app.screens.diagnosis import DiagnoseScreen
from ltui.app.screens.dialog import ConfirmScreen
from ltui.app.screens.help import HelpScreen
from ltui.app.screens.run import FrameArrived, RunScreen
from ltui.app.screens.run_commands import StopWhenScreen
from ltui.training.state.run_snapshot import CheckpointInfo, RankState, RunState, Verdict
from ltui.widgets.charts.chart import Chart
from ltui.widgets.header import RunHeader
from ltui.widgets.log_view import LogLines, LogView
from ltui.widgets.run_tables import RankTable
from tests.app.frames import frame, log_lines, rank, snapshot
from tests.app.one_run import (
    OneRun,
    Script,
    answer,
    later,
    noticed,
    notices,
    one_run,
    reached,
    text_of_screen,
    until,
)
from tests.required import required
from tests.waiting import wait_for

FIVE = set(PANELS) - {DETAILS}
STOPPED = snapshot(state=RunState.STOPPED, detail="stopped at step 1204")


def visible(screen: RunScreen) -> set[str]:
    return {name for name in PANELS if screen.query_one(f"#{name}").display}


async def press(pilot: Pilot[Any], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()


async def test_every_size_shows_its_panels_and_resizing_loses_nothing() -> None:
    async with one_run(frame()) as (pilot, _, screen):
        assert visible(screen) == FIVE
        await pilot.press("4")
        for size, count in (
            *(((100, 26), 3), ((80, 24), 1), ((40, 10), 0), ((200, 60), 6), ((160, 50), 5)),
        ):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            # Tables of few rows leave the rest of a small screen to the log.
            assert len(visible(screen) - ({"log"} if count == 1 else set())) == count
            assert screen.query_one("#tiny").display == (count == 0)
            assert screen.query_one("#details").display == (count == 6)
        assert visible(screen) == FIVE
        assert screen.panels.panel_layout.chosen == "ranks"
        assert len(screen.query_one(RankTable).rows) == 4


async def test_a_banner_takes_its_line_from_the_first_frame_on() -> None:
    stall = Verdict(kind="stall", level="stalled", culprits=(2,), cause="rank 2 waits")
    async with one_run(frame(snapshot=snapshot(verdicts=(stall,)))) as (pilot, app, screen):
        await until(pilot, lambda: screen.query_one(RunHeader).size.height == 2)
        app.script.frame = frame()
        await until(pilot, lambda: screen.query_one(RunHeader).size.height == 1)


async def test_tabs_switch_and_zoom_gives_the_screen() -> None:
    async with one_run(frame(), (80, 24)) as (pilot, _, screen):
        for key, name in zip("123456", PANELS, strict=True):
            await press(pilot, key)
            # Tables of few rows leave the rest of the screen to the log.
            assert visible(screen) == ({name, "log"} if name in ("gpus", "ranks") else {name})
        await pilot.resize_terminal(160, 50)
        await press(pilot, "0", "4", "z")
        assert visible(screen) == {"ranks"}
        await pilot.press("5")
        assert visible(screen) == {"log"}
        await pilot.press("z")
        assert visible(screen) == FIVE
        await pilot.press("z", "0")
        assert visible(screen) == FIVE
        await pilot.click("#rank-table")
        assert screen.panels.panel_layout.chosen == "ranks"


async def test_tab_goes_through_all_panels_where_one_is_shown() -> None:
    async with one_run(frame(), (80, 24)) as (pilot, _, screen):

        async def first_panels(key: str) -> list[str]:
            """Press ``key`` until the first panel is shown again."""
            names: list[str] = []
            while not names or names[-1] != "loss":
                assert len(names) < 20
                await press(pilot, key)
                (name, *_) = [name for name in PANELS if name in visible(screen)]
                if name not in names[-1:]:
                    names.append(name)
            return names

        assert await first_panels("tab") == [*PANELS[1:], "loss"]
        assert await first_panels("shift+tab") == [*reversed(PANELS)]
        await pilot.resize_terminal(160, 50)
        await pilot.press("z", "tab")
        assert visible(screen) == {"throughput"}


async def test_ranks_are_drawn_while_the_log_below_them_has_the_focus() -> None:
    async with one_run(frame(), (80, 24)) as (pilot, app, screen):
        await pilot.press("4", "tab")
        await until(pilot, lambda: isinstance(screen.focused, LogView | LogLines))
        later = snapshot(ranks=tuple(rank(r, global_step=7777) for r in range(4)))
        app.script.frame = frame(snapshot=later)
        table = screen.query_one(RankTable)
        await until(pilot, lambda: all(row.step == "7777" for row in table.rows))
        await pilot.press("z")
        assert visible(screen) == {"log"}


async def test_a_run_is_drawn_below_a_dialog_every_two_seconds() -> None:
    first = frame()
    async with one_run(first, (80, 24)) as (pilot, app, screen):
        header = screen.query_one(RunHeader)
        before = header.view_model
        await pilot.press("s")
        await until(pilot, lambda: app.screen is not screen)
        ended = replace(snapshot(), state=RunState.FINISHED)
        app.script.frame = replace(first, snapshot=ended, now=first.now + 1.5)
        await until(pilot, lambda: screen.frame is app.script.frame)
        await pilot.pause()
        assert header.view_model == before
        app.script.frame = replace(first, snapshot=ended, now=first.now + 2.0)
        await until(pilot, lambda: header.view_model != before)


async def test_metrics_checkpoints_and_events_are_reached_at_every_size() -> None:
    sizes = [(60, 15), (80, 24), (100, 26), (120, 40), (130, 39), (160, 50), (200, 60)]
    async with one_run(frame(events=((1e9, "Attempt 2 began."),)), sizes[0]) as (pilot, _, screen):
        for size in sizes:
            await pilot.resize_terminal(*size)
            await press(pilot, "6")
            assert DETAILS in visible(screen)
            view = screen.query_one(DetailsView)
            assert view.has_focus
            text = "".join(str(part.render()) for part in view.query(Static))
            for words in ("val_acc", "checkpoints", "step 1", "events", "Attempt 2 began."):
                assert words in text
            await press(pilot, "end")
            assert view.scroll_offset.y == view.max_scroll_y
            tabs = screen.query_one(TabBar)
            assert not tabs.display or str(tabs.render()).strip().endswith("6 details")
            await press(pilot, "1")
            assert "loss" in visible(screen)


def on_cpu(ranks: int) -> Frame:
    rows = tuple(rank(number, device="cpu") for number in range(ranks))
    run = snapshot(ranks=rows, world_size=ranks, gpus=(), gpu_note="no NVIDIA driver")
    return frame(snapshot=run, gpu_series={})


async def test_two_ranks_on_a_cpu_leave_the_room_to_charts_and_log() -> None:
    async with one_run(on_cpu(2), (120, 40)) as (pilot, _, screen):
        assert visible(screen) == FIVE - {"gpus"}
        assert screen.query_one("#ranks").size.height == 3
        assert screen.query_one(LogView).size.height >= 8
        await press(pilot, "3")
        assert "gpus" in visible(screen)
        await press(pilot, "0")
        assert "gpus" not in visible(screen)
        for size in ((120, 40), (160, 50)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            before = visible(screen)
            await press(pilot, "right_square_bracket")
            assert DETAILS in visible(screen)
            await press(pilot, "right_square_bracket")
            assert visible(screen) == before
    layout = PanelLayout(width=100, height=26, needs=table_lines(on_cpu(16).snapshot))
    assert layout.visible() == {"loss", "throughput", "ranks"}, "many ranks are a tab"


async def test_a_stop_for_later_is_typed_and_refused_where_it_means_nothing() -> None:
    stands = frame(snapshot=snapshot(stops=("at step 500",)))
    async with one_run(stands) as (pilot, app, screen):
        assert "stops at step 500" in required(screen.query_one(RunHeader).view_model).notes
        await pilot.press("S")
        question = await reached(pilot, StopWhenScreen)
        later(app)
        await pilot.press(*"soon", "enter")
        assert app.screen is question
        assert app.asked == []
        # A step that has passed is refused here, so that the text can be corrected.
        answers = question.query_one("#answers", Static)
        await pilot.press(*["backspace"] * 4, *"7", "enter")
        assert "step 7 has passed" in str(answers.content)
        await pilot.press("backspace", *"loss<nan", "enter")
        assert "--when" not in str(answers.content)
        await pilot.press(*["backspace"] * 8, *"1750", "enter")
        await reached(pilot, RunScreen)
        await pilot.press("S")
        await reached(pilot, StopWhenScreen)
        await pilot.press("escape")
        await reached(pilot, RunScreen)
        assert app.asked == ["stop_when"]
        # A name that was never logged is taken, as it may come, but pointed out.
        await pilot.press("S")
        await reached(pilot, StopWhenScreen)
        later(app)
        await pilot.press(*"los<1", "enter")
        await until(pilot, lambda: app.asked == ["stop_when", "stop_when"])
        assert app.confirmations[0] is None
        assert "`los` has not been logged yet" in str(app.confirmations[1])


async def test_control_keys_ask_and_kill_asks_first_also_in_a_table() -> None:
    async with one_run(frame()) as (pilot, app, _):
        await pilot.press("p", "c")
        assert app.asked == ["pause", "checkpoint"]
        await pilot.press("4", "k")
        await reached(pilot, ConfirmScreen)
        await pilot.press("n")
        await reached(pilot, RunScreen)
        assert app.asked == ["pause", "checkpoint"]
        await pilot.press("k")
        await answer(pilot)
        await until(pilot, lambda: "kill" in app.asked)


async def test_paused_continues_and_ended_resumes() -> None:
    script = Script(frame(snapshot=snapshot(state=RunState.PAUSED)))
    async with one_run(script) as (pilot, app, screen):
        await pilot.press("p", "r")
        assert app.asked == ["continue"]
        script.frame = frame(snapshot=STOPPED)
        await until(pilot, lambda: required(screen.snapshot).state is RunState.STOPPED)
        await pilot.press("p", "s", "r", "R")
        assert app.asked == ["continue", "resume", "rerun"]


async def test_readonly_refuses_every_control_and_says_so() -> None:
    async with one_run(frame(), readonly=True) as (pilot, app, screen):
        await press(pilot, "s", "p", "c", "k")
        assert app.asked == []
        assert app.screen is screen
        assert any("only watches" in text for text in notices(app))
        hints = {hint.key for hint in screen.query_one(KeyFooter)._hints}
        assert not hints & {"s", "p", "c", "k", "r"}


async def test_axis_smoothing_and_scale() -> None:
    async with one_run(frame()) as (pilot, _, screen):
        chart, charts = screen.query_one("#loss-chart", Chart), screen.query_one(RunCharts)
        await pilot.press("x")
        assert required(chart.view_model).x_label == "epoch"
        await pilot.press("plus")
        assert charts.settings.smoothing > 0.9
        await pilot.press("minus", "minus")
        assert charts.settings.smoothing < 0.9
        await pilot.press("4", "y")
        assert chart.is_log
        await pilot.press("0")
        assert not chart.is_log
        assert charts.settings.axis == "step"


async def test_a_failing_feed_is_a_line_with_its_age_and_the_last_figures_stay() -> None:
    script = Script(frame())
    async with one_run(script) as (pilot, _, screen):
        script.frame = OSError("the disk is gone")

        def notes() -> str:
            return "\n".join(required(screen.query_one(RunHeader).view_model).notes)

        await until(pilot, lambda: "disk is gone" in notes())
        assert len(screen.query_one(RankTable).rows) == 4
        script.frame = frame()
        await until(pilot, lambda: notes() == "")


async def test_help_palette_and_diagnosis_open_and_close() -> None:
    async with one_run(frame()) as (pilot, app, _):
        await pilot.press("question_mark")
        await reached(pilot, HelpScreen)
        await pilot.press("escape", "d")
        await reached(pilot, DiagnoseScreen)
        await pilot.press("escape")
        titles = {command.title for command in app.get_system_commands(app.run_screen)}
        assert {"Stop", "Kill", "Checkpoint", "Maximise"} <= titles
        await press(pilot, "ctrl+p")
        await pilot.press("escape")


async def test_the_log_is_extended_filtered_and_searched_and_of_one_rank() -> None:
    script = Script(frame())
    async with one_run(script) as (pilot, app, screen):
        view = screen.query_one(LogView)
        await until(pilot, lambda: len(view.lines) == 40)
        await press(pilot, "4", "down", "down", "enter")
        assert screen.panels.log_panel.source == 2
        assert screen.panels.panel_layout.chosen == "log"
        assert len(view.lines) == 10
        assert "log, rank 2" in str(screen.query_one("#log").border_title)
        await pilot.press("v", "v", "v")
        script.frame = frame(log=log_lines(44), log_count=44)
        await until(pilot, lambda: len(view.lines) == 44)
        await pilot.press("v")
        assert len(view.lines) == 11
        await pilot.press("v", "v", "v", "v", "v")
        assert len(view.lines) == 44
        await pilot.press("slash", *"batch 7", "enter")
        assert len(view.lines.hits()) == 1
        assert app.asked == []


async def test_markup_from_a_run_is_shown_as_it_is() -> None:
    evil = "[bold red]x[/] [@click=app.bell]y[/]"
    run = snapshot(
        name=evil, preset=evil, detail=evil, history_note=evil,
        ranks=(rank(0, note=evil, state=RankState.DEAD),),
    )  # fmt: skip
    async with one_run(frame(snapshot=run), (200, 60)) as (pilot, _, screen):
        header = screen.query_one(RunHeader)
        assert required(header.view_model).name == evil
        assert "[bold red]" in header.render_line(0).text
        await pilot.press("d")
        await reached(pilot, DiagnoseScreen)
        await pilot.press("escape", "k")
        await reached(pilot, ConfirmScreen)


async def test_leaving_says_that_the_run_goes_on_and_ends_the_feed() -> None:
    script = Script(frame())
    async with one_run(script) as (pilot, _, screen):
        assert screen.farewell() == (
            "brave-owl keeps running. To watch it: ltui attach brave-owl-3f2a"
        )
        assert still_live(snapshot(state=RunState.STOPPING)) == "brave-owl is still stopping"
        await press(pilot, "q")
    wait_for(lambda: script.closed)


def test_of_two_waiting_frames_the_latest_wins() -> None:
    first, second = FrameArrived(frame()), FrameArrived(replace(frame(), now=5.0))
    assert second.can_replace(first)


async def test_the_log_opens_at_its_end_and_that_of_a_run_that_has_ended_is_not_live() -> None:
    log = {"log": log_lines(400), "log_count": 400}
    async with one_run(frame(**log)) as (pilot, app, screen):
        lines, panel = screen.query_one(LogView).lines, screen.query_one("#log")
        await until(pilot, lambda: len(lines) == 400)
        await pilot.pause()
        assert "batch 399" in lines.render_line(lines.size.height - 1).text
        await until(pilot, lambda: str(panel.border_subtitle).endswith("live"))
        app.script.frame = frame(snapshot=STOPPED, **log)
        await until(pilot, lambda: str(panel.border_subtitle).endswith("ended"))
        await pilot.press("5", "f")
        await until(pilot, lambda: str(panel.border_subtitle).endswith("f: jump to newest"))


async def test_how_a_run_ended_is_a_notice_and_one_line_that_escape_hides() -> None:
    saved = CheckpointInfo(
        path="/c/a.ckpt", global_step=18000, ok=True, size_bytes=803_840, weights="finite"
    )
    script = Script(frame())
    async with one_run(script, (80, 24)) as (pilot, app, screen):
        script.frame = frame(snapshot=replace(STOPPED, checkpoints=(saved,)))
        ending = screen.query_one("#ending", Static)
        await until(pilot, lambda: ending.size.height == 1)
        await noticed(pilot, app, "stopped at step 1204")
        text = str(ending.render())
        assert "stopped at step" not in text, "the header says it"
        assert "step 18000, " in text
        assert text.endswith("r resume")
        await pilot.press("escape")
        await until(pilot, lambda: not ending.display)
        assert app.screen is screen


async def test_an_ended_run_without_values_says_of_nothing_that_it_will_come() -> None:
    ended = snapshot(state=RunState.FAILED, ranks=(), gpus=(), metrics={}, checkpoints=())
    empty = frame(snapshot=ended, curves={}, curve_names=(), rates={}, log=(), log_count=0)
    async with one_run(empty) as (pilot, app, _):
        await pilot.pause()
        text = text_of_screen(app)
        assert "no rank reported" in text
        assert "nothing was written" in text
        assert not re.search(r"\byet\b|\blive\b", text)


async def test_nothing_claims_to_be_empty_before_the_first_frame() -> None:
    class Slow(Script):
        def poll(self, now: float, now_ns: int) -> Frame:
            asked.wait(60)
            return super().poll(now, now_ns)

    asked = threading.Event()
    app = OneRun(Slow(frame()))
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause()
        text = text_of_screen(app)
        asked.set()
        assert "loading …" in text
        assert not re.search("no data yet|nothing written|has reported yet|live", text)
