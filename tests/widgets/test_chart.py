"""The chart under keys, mouse and new data."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from msgspec.structs import replace
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.geometry import Region

from ltui.widgets.charts.axis_scale import visible_range
from ltui.widgets.charts.chart import Chart
from ltui.widgets.charts.plot import data_range
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel


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

    @property
    def chart(self) -> Chart:
        return self.query_one(Chart)


def text_of(chart: Chart) -> str:
    region = chart.size.region
    return "\n".join(strip.text for strip in chart.render_lines(region))


async def test_shows_curve_axes_and_values() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)):
        text = text_of(app.chart)
        assert "train 1.002" in text
        assert "step" in text


async def test_an_empty_chart_says_why() -> None:
    app = ChartApp(ChartViewModel(title="loss", note="no validation yet"))
    async with app.run_test(size=(60, 12)):
        assert "no validation yet" in text_of(app.chart)


async def test_arrows_move_the_crosshair_over_points() -> None:
    app = ChartApp(chart_of(count=20))
    async with app.run_test(size=(100, 20)) as pilot:
        app.chart.focus()
        await pilot.press("left")
        assert app.chart.crosshair == 19
        await pilot.press("left", "left")
        assert app.chart.crosshair == 17
        assert "step 17" in text_of(app.chart)
        await pilot.press("right", "right", "right", "right")
        assert app.chart.crosshair == 19
        await pilot.pause()
        assert app.seen[:3] == [19, 18, 17]


async def test_escape_clears_step_by_step_and_then_is_the_screens() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        app.chart.focus()
        await pilot.press("up", "left")
        assert app.chart.view is not None
        assert app.chart.crosshair is not None
        await pilot.press("escape")
        assert app.chart.crosshair is None
        assert app.chart.view is not None
        await pilot.press("escape")
        assert app.chart.view is None
        assert app.left == 0
        await pilot.press("escape")
        assert app.left == 1


async def test_zoom_at_the_end_follows_new_points() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        app.chart.focus()
        await pilot.press("up", "up", "up")
        assert app.chart.view is not None
        assert app.chart.view.follow
        app.chart.view_model = chart_of(count=3000)
        await pilot.pause()
        data = data_range(app.chart.view_model)
        assert data is not None
        now = visible_range(app.chart.view, data)
        assert now.low > 2000
        assert now.high >= 2999
        await pilot.press("home")
        assert app.chart.view is None


async def test_pan_keeps_its_place_while_data_grows() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        app.chart.focus()
        await pilot.press("up", "up", "up", "shift+left", "shift+left")
        view = app.chart.view
        assert view is not None
        assert not view.follow
        app.chart.view_model = chart_of(count=3000)
        await pilot.pause()
        assert app.chart.view == view
        await pilot.press("end")
        assert app.chart.view.follow


async def test_the_wheel_zooms_around_the_pointer_and_hover_reads_out() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.hover(Chart, offset=(50, 10))
        await pilot.pause()
        crosshair = app.chart.crosshair
        assert crosshair is not None
        assert 400 < crosshair < 600
        await pilot._post_mouse_events([_scroll_up()], Chart, (50, 10))
        assert app.chart.view is not None
        assert app.chart.view.low < crosshair < app.chart.view.high


def _scroll_up() -> type:
    from textual.events import MouseScrollUp

    return MouseScrollUp


async def test_y_switches_the_scale_and_back() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        app.chart.focus()
        linear = text_of(app.chart)
        await pilot.press("y")
        assert app.chart.is_log
        assert text_of(app.chart) != linear
        await pilot.press("y")
        assert text_of(app.chart) == linear


async def test_a_log_axis_stays_while_the_same_curves_grow() -> None:
    app = ChartApp(replace(chart_of(), log_y=True))
    async with app.run_test(size=(80, 20)):
        app.chart.view_model = chart_of(1100)
        assert app.chart.is_log
        app.chart.action_toggle_log()
        assert not app.chart.is_log
        app.chart.log_y = None
        app.chart.view_model = chart_of(2000)
        assert not app.chart.is_log, "a log axis would hide the values below zero"


async def test_without_data_no_key_fails() -> None:
    app = ChartApp(None)
    async with app.run_test(size=(60, 12)) as pilot:
        app.chart.focus()
        await pilot.press("left", "right", "up", "down", "shift+left", "home", "end", "y", "g")
        await pilot.hover(Chart, offset=(10, 5))
        assert "loading" in text_of(app.chart)


async def test_only_what_changed_is_repainted(monkeypatch: pytest.MonkeyPatch) -> None:
    app = ChartApp(chart_of(count=1000))
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause()
        painted: list[tuple[Region, ...]] = []
        whole = app.chart.refresh

        def noted(*regions: Region, **more: bool) -> Chart:
            painted.append(regions)
            return whole(*regions, **more)

        monkeypatch.setattr(app.chart, "refresh", noted)
        app.chart.view_model = chart_of(count=1001)
        await pilot.pause()
        cells = sum(r.area for regions in painted for r in regions)
        assert painted
        assert all(painted)
        assert 0 < cells < 160 * 50 // 10
        painted.clear()
        app.chart.view_model = chart_of(count=1001)
        await pilot.pause()
        assert painted == []


async def test_a_part_repainted_shows_what_the_whole_would() -> None:
    app = ChartApp(chart_of(count=1000))
    async with app.run_test(size=(80, 24)) as pilot:
        for count in (1001, 1040, 1200, 3000, 10):
            app.chart.view_model = chart_of(count=count)
            await pilot.pause()
            by_parts = text_of(app.chart)
            app.chart.refresh()
            await pilot.pause()
            assert by_parts == text_of(app.chart)


def marked(count: int = 1000) -> ChartViewModel:
    marks = (
        ChartMark(at=100, sign="◆", text="checkpoint of step 100"),
        ChartMark(at=600, sign="!", text="stalled for 8 s", line=True),
        ChartMark(at=900, sign="»", text="attempt 2", line=True),
    )
    return replace(chart_of(count), marks=marks)


async def test_dragging_selects_a_range_and_home_shows_all_again() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.mouse_down(Chart, offset=(40, 10))
        await pilot.hover(Chart, offset=(60, 10))
        assert sum(letter == "│" for letter in text_of(app.chart).splitlines()[5]) == 2
        assert app.chart.view is None
        await pilot.mouse_up(Chart, offset=(60, 10))
        view = app.chart.view
        assert view is not None
        assert 300 < view.low < 400 < 500 < view.high < 620
        assert not view.follow
        assert "│" not in text_of(app.chart)
        await pilot.press("home")
        assert app.chart.view is None


async def test_a_click_selects_no_range() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.click(Chart, offset=(40, 10))
        assert app.chart.view is None


async def test_dragging_along_the_labels_of_the_y_axis_selects_no_range() -> None:
    app = ChartApp(chart_of())
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.mouse_down(Chart, offset=(0, 10))
        await pilot.hover(Chart, offset=(4, 10))
        await pilot.mouse_up(Chart, offset=(4, 10))
        assert app.chart.view is None


async def test_marks_are_visited_in_both_directions_and_named() -> None:
    app = ChartApp(marked())
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.pause()
        chart = app.chart
        assert [m.at if (m := chart.move_to_mark(-1)) else None for _ in range(4)] == [
            *(900, 600, 100),
            None,
        ]
        assert chart.crosshair == 100
        assert "checkpoint of step 100" in text_of(chart)
        chart.move_to_mark(1)
        assert "stalled for 8 s" in text_of(chart)


async def test_a_mark_outside_the_visible_part_moves_it() -> None:
    app = ChartApp(marked())
    async with app.run_test(size=(100, 20)) as pilot:
        app.chart.focus()
        await pilot.press(*["up"] * 6)
        assert "»" not in text_of(app.chart) or app.chart.move_to_mark(-1)
        while (mark := app.chart.move_to_mark(-1)) is not None and mark.at > 100:
            pass
        now = app.chart.zoomed_range()
        assert now is not None
        assert now.low < 100 < now.high
        assert "◆" in text_of(app.chart)
