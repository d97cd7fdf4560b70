"""The chart under keys, mouse and new data."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import MouseScrollUp
from textual.geometry import Region
from textual.pilot import Pilot

from ltui.widgets.charts.axis_scale import Viewport, visible_range
from ltui.widgets.charts.chart import Chart
from ltui.widgets.charts.plot import data_range
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel
from tests.required import required


def chart_of(count: int = 1000, title: str = "loss") -> ChartViewModel:
    x = np.arange(count, dtype=np.float64)
    return ChartViewModel(title=title, series=(ChartSeries(name="train", x=x, y=3.0 - x / 500),))


class ChartApp(App[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "left", "leave")]

    def __init__(self, first: ChartViewModel | None) -> None:
        super().__init__()
        self.first = first
        self.seen: list[object] = []
        self.left = 0

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Chart(self.first)

    def action_left(self) -> None:
        self.left += 1

    def on_chart_crosshair_moved(self, message: Chart.CrosshairMoved) -> None:
        self.seen.append(message.x)

    def on_chart_view_changed(self, message: Chart.ViewChanged) -> None:
        self.seen.append(message.view)


@asynccontextmanager
async def chart_app(
    first: ChartViewModel | None, size: tuple[int, int] = (100, 20)
) -> AsyncIterator[tuple[Pilot[Any], ChartApp, Chart]]:
    """Yield pilot, app and a chart that has the focus."""
    app = ChartApp(first)
    async with app.run_test(size=size) as pilot:
        chart = app.query_one(Chart)
        chart.focus()
        await pilot.pause()
        yield pilot, app, chart


def text_of(chart: Chart) -> str:
    region = chart.size.region
    return "\n".join(strip.text for strip in chart.render_lines(region))


def view_of(chart: Chart) -> Viewport:
    return required(chart.view)


async def test_arrows_move_the_crosshair_over_points() -> None:
    async with chart_app(chart_of(count=20)) as (pilot, app, chart):
        await pilot.press("left")
        assert chart.crosshair == 19
        await pilot.press("left", "left")
        assert chart.crosshair == 17
        assert "step 17" in text_of(chart)
        await pilot.press("right", "right", "right", "right")
        assert chart.crosshair == 19
        await pilot.pause()
        assert app.seen[:3] == [19, 18, 17]


async def test_escape_clears_step_by_step_and_then_is_the_screens() -> None:
    async with chart_app(chart_of()) as (pilot, app, chart):
        await pilot.press("up", "left")
        assert chart.view is not None
        assert chart.crosshair is not None
        await pilot.press("escape")
        assert chart.crosshair is None
        assert chart.view is not None
        await pilot.press("escape")
        assert chart.view is None
        assert app.left == 0
        await pilot.press("escape")
        assert app.left == 1


async def test_zoom_at_the_end_follows_new_points_and_pan_keeps_its_place() -> None:
    async with chart_app(chart_of()) as (pilot, _, chart):
        await pilot.press("up", "up", "up")
        assert view_of(chart).follow
        chart.view_model = chart_of(count=3000)
        await pilot.pause()
        now = visible_range(chart.view, required(data_range(chart.view_model)))
        assert now.low > 2000
        assert now.high >= 2999
        await pilot.press("home")
        assert chart.view is None
        await pilot.press("up", "up", "up", "shift+left", "shift+left")
        view = view_of(chart)
        assert not view.follow
        chart.view_model = chart_of(count=5000)
        await pilot.pause()
        assert chart.view == view
        await pilot.press("end")
        assert view_of(chart).follow


async def test_the_wheel_zooms_around_the_pointer_and_hover_reads_out() -> None:
    async with chart_app(chart_of()) as (pilot, _, chart):
        await pilot.hover(Chart, offset=(50, 10))
        await pilot.pause()
        crosshair = required(chart.crosshair)
        assert 400 < crosshair < 600
        await pilot._post_mouse_events([MouseScrollUp], Chart, (50, 10))
        assert view_of(chart).low < crosshair < view_of(chart).high


async def test_y_switches_the_scale_and_back() -> None:
    async with chart_app(chart_of()) as (pilot, _, chart):
        linear = text_of(chart)
        await pilot.press("y")
        assert chart.is_log
        assert text_of(chart) != linear
        await pilot.press("y")
        assert text_of(chart) == linear


async def test_a_log_axis_stays_while_the_same_curves_grow() -> None:
    async with chart_app(replace(chart_of(), log_y=True)) as (_, _, chart):
        chart.view_model = chart_of(1100)
        assert chart.is_log
        chart.action_toggle_log()
        assert not chart.is_log
        chart.log_y = None
        chart.view_model = chart_of(2000)
        assert not chart.is_log, "a log axis would hide the values below zero"


async def test_without_data_no_key_fails() -> None:
    async with chart_app(None, (60, 12)) as (pilot, _, chart):
        await pilot.press("left", "right", "up", "down", "shift+left", "home", "end", "y", "g")
        await pilot.hover(Chart, offset=(10, 5))
        assert "loading" in text_of(chart)


async def test_only_what_changed_is_repainted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chart_app(chart_of(count=1000), (160, 50)) as (pilot, _, chart):
        painted: list[tuple[Region, ...]] = []
        whole = chart.refresh

        def noted(*regions: Region, **more: bool) -> Chart:
            painted.append(regions)
            return whole(*regions, **more)

        monkeypatch.setattr(chart, "refresh", noted)
        chart.view_model = chart_of(count=1001)
        await pilot.pause()
        cells = sum(r.area for regions in painted for r in regions)
        assert painted
        assert all(painted)
        assert 0 < cells < 160 * 50 // 10
        painted.clear()
        chart.view_model = chart_of(count=1001)
        await pilot.pause()
        assert painted == []


async def test_a_part_repainted_shows_what_the_whole_would() -> None:
    async with chart_app(chart_of(count=1000), (80, 24)) as (pilot, _, chart):
        for count in (1001, 1040, 1200, 3000, 10):
            chart.view_model = chart_of(count=count)
            await pilot.pause()
            by_parts = text_of(chart)
            chart.refresh()
            await pilot.pause()
            assert by_parts == text_of(chart)


async def test_dragging_selects_a_range_and_home_shows_all_again() -> None:
    async with chart_app(chart_of()) as (pilot, _, chart):
        # A click selects no range, nor does dragging along the labels of the axis.
        await pilot.click(Chart, offset=(40, 10))
        await drag(pilot, 0, 4)
        await pilot.mouse_up(Chart, offset=(4, 10))
        assert chart.view is None
        await drag(pilot, 40, 60)
        assert sum(letter == "│" for letter in text_of(chart).splitlines()[5]) == 2
        assert chart.view is None
        await pilot.mouse_up(Chart, offset=(60, 10))
        view = view_of(chart)
        assert 300 < view.low < 400 < 500 < view.high < 620
        assert not view.follow
        assert "│" not in text_of(chart)
        await pilot.press("home")
        assert chart.view is None


async def drag(pilot: Pilot[Any], start: int, end: int) -> None:
    await pilot.mouse_down(Chart, offset=(start, 10))
    await pilot.hover(Chart, offset=(end, 10))


async def test_marks_are_visited_in_both_directions_named_and_moved_into_view() -> None:
    marks = (
        ChartMark(at=100, sign="◆", text="checkpoint of step 100"),
        ChartMark(at=600, sign="!", text="stalled for 8 s", line=True),
        ChartMark(at=900, sign="»", text="attempt 2", line=True),
    )
    async with chart_app(replace(chart_of(), marks=marks)) as (pilot, _, chart):
        visited = [m.at if (m := chart.move_to_mark(-1)) else None for _ in range(4)]
        assert visited == [900, 600, 100, None]
        assert chart.crosshair == 100
        assert "checkpoint of step 100" in text_of(chart)
        chart.move_to_mark(1)
        assert "stalled for 8 s" in text_of(chart)
        await pilot.press("escape", *["up"] * 6)
        while (mark := chart.move_to_mark(-1)) is not None and mark.at > 100:
            pass
        now = required(chart.zoomed_range())
        assert now.low < 100 < now.high
        assert "◆" in text_of(chart)
