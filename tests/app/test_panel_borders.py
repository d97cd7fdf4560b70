"""Borders between the panels of a run screen: moved by keys and mouse, remembered, reset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widget import Widget

from ltui.app.panels.movable_borders import DETAILS_WIDTH, FIRST_CHART_WIDTH, Regions
from ltui.app.panels.run_panels import RunPanels
from ltui.app.settings import read_preferences, write_preference
from tests.app.frames import frame
from tests.app.one_run import OneRun, noticed, notices, one_run, settled, until
from tests.app.test_user_config import write_config


def region(app: OneRun, name: str) -> Region:
    return app.run_screen.query_one(f"#{name}", Widget).region


async def drag(pilot: Pilot[Any], app: OneRun, start: tuple[int, int], by: tuple[int, int]) -> None:
    panels = app.run_screen.query_one(RunPanels)
    x, y = start[0] - panels.region.x, start[1] - panels.region.y
    await pilot.mouse_down(panels, offset=(x, y))
    await pilot.hover(panels, offset=(x + by[0], y + by[1]))
    await pilot.mouse_up(panels, offset=(x + by[0], y + by[1]))
    await settled(pilot)


async def test_keys_move_the_border_of_the_panel_in_focus_and_it_is_remembered(
    tmp_path: Path,
) -> None:
    async with one_run(frame(), home=tmp_path) as (pilot, app, _):
        await settled(pilot)
        width, height = region(app, "loss").width, region(app, "charts").height
        await pilot.press("1", "ctrl+right", "ctrl+right", "ctrl+up", "left_parenthesis")
        await settled(pilot)
        moved = region(app, "loss").width, region(app, "charts").height
        assert moved[0] > width + 10
        assert moved[1] < height
        assert len(read_preferences(tmp_path)) == 2
    async with one_run(frame(), home=tmp_path) as (pilot, again, _):
        await settled(pilot)
        assert (region(again, "loss").width, region(again, "charts").height) == moved
        await pilot.press("0")
        await settled(pilot)
        assert (region(again, "loss").width, region(again, "charts").height) == (width, height)
        assert read_preferences(tmp_path) == {}


async def test_the_mouse_drags_borders(tmp_path: Path) -> None:
    async with one_run(frame(), (200, 50), home=tmp_path) as (pilot, app, _):
        await settled(pilot)
        loss, charts = region(app, "loss"), region(app, "charts")
        await drag(pilot, app, (loss.right - 1, loss.y + 3), (-20, 0))
        assert abs(region(app, "loss").width - (loss.width - 20)) <= 1
        await drag(pilot, app, (loss.x + 5, charts.bottom - 1), (0, -4))
        assert abs(region(app, "charts").height - (charts.height - 4)) <= 1
        log = region(app, "log")
        await drag(pilot, app, (log.x + 5, log.y), (0, 3))
        assert abs(region(app, "log").height - (log.height - 3)) <= 1
        details = region(app, "details")
        await drag(pilot, app, (details.x, details.y + 4), (10, 0))
        assert region(app, "details").width == details.width - 10
        stored = read_preferences(tmp_path)
        assert stored[DETAILS_WIDTH] == details.width - 10
        assert stored[FIRST_CHART_WIDTH] < 50


@pytest.mark.parametrize("size", [(200, 50), (110, 30)])
async def test_no_panel_disappears_however_far_a_border_is_moved(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with one_run(frame(), size, home=tmp_path) as (pilot, app, screen):
        for key in ("up", "left", "down", "right"):
            await pilot.press("0", *([f"ctrl+{key}"] * 20))
            await settled(pilot)
            for name in screen.panels.panel_layout.visible():
                panel = region(app, name)
                assert panel.width >= 8, name
                assert panel.height >= 3, name
                assert screen.region.contains_region(panel), name


async def test_small_terminals_have_no_border_and_say_so(tmp_path: Path) -> None:
    write_preference(tmp_path, FIRST_CHART_WIDTH, 20)
    write_preference(tmp_path, "layout.charts_height", 90)
    async with one_run(frame(), (80, 24), notifications=True, home=tmp_path) as (pilot, app, _):
        await pilot.press("ctrl+right")
        await noticed(pilot, app, "There is no border to move here.")
        for key, name in (("1", "loss"), ("2", "throughput"), ("5", "log")):
            await pilot.press(key)
            await until(pilot, lambda n=name: region(app, n).width == 80)  # type: ignore[misc]
            assert region(app, name).height >= 18


async def test_the_file_wins_over_a_moved_border_which_holds_until_the_end(tmp_path: Path) -> None:
    write_preference(tmp_path, FIRST_CHART_WIDTH, 70)
    write_config("layout: {first_chart_width: 30, details: true}\n")
    async with one_run(frame(), notifications=True, home=tmp_path) as (pilot, app, _):
        await settled(pilot)
        assert region(app, "details").width == 56
        width = region(app, "loss").width
        assert width < region(app, "throughput").width / 2
        await pilot.press("1", "greater_than_sign", "greater_than_sign")
        await noticed(pilot, app, "config.yaml:1 sets layout.first_chart_width: the choice holds")
        assert region(app, "loss").width > width
        assert len(notices(app)) == 1
        assert read_preferences(tmp_path) == {FIRST_CHART_WIDTH: 70}


async def test_whether_the_details_are_shown_is_remembered(tmp_path: Path) -> None:
    async with one_run(frame(), home=tmp_path) as (pilot, _, _):
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: read_preferences(tmp_path) == {"layout.details": True})
    async with one_run(frame(), home=tmp_path) as (pilot, again, _):
        await until(pilot, lambda: region(again, "details").width == 56)


@pytest.mark.parametrize("stored", [True, "60", -5])
async def test_a_damaged_size_does_no_harm(tmp_path: Path, stored: object) -> None:
    write_preference(tmp_path, DETAILS_WIDTH, stored)
    write_preference(tmp_path, FIRST_CHART_WIDTH, stored)
    async with one_run(frame(), (200, 50), home=tmp_path) as (pilot, app, _):
        await settled(pilot)
        assert 30 <= region(app, "details").width <= 120
        assert region(app, "loss").width >= 8


def test_no_border_is_found_inside_a_panel() -> None:
    regions = Regions(
        first=Region(0, 2, 50, 20), second=Region(50, 2, 50, 20), below=Region(0, 30, 100, 10)
    )
    found = {regions.border_at(x, y) for x in range(1, 49) for y in (3, 10, 20, 24, 28, 33)}
    assert found == {None}
    assert Regions().border_at(0, 0) is None
