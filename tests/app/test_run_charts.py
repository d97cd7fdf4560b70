"""The charts of a run screen under keys: choice of metrics, linked zoom, detail on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.live.frame import Frame
from ltui.app.panels.panel import Panel
from ltui.app.panels.run_charts import RunCharts
from ltui.app.presentation.metric_names import DESCRIPTIONS, MetricChoice
from ltui.app.screens.choosers import MetricChooser
from ltui.app.screens.metrics import MetricsScreen
from ltui.app.screens.run import RunScreen
from ltui.app.settings import read_preferences
from ltui.widgets.charts.chart import Chart
from tests.app.frames import curve, frame, snapshot
from tests.app.one_run import OneRunAt, Script, one_run, reached, until
from tests.required import required

NAMES = ("step/lr", "train/loss", "val/acc", "val/loss")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home in which a choice can be remembered."""
    tmp_path.joinpath("runs").mkdir()
    return tmp_path


def many(points: int = 400) -> Frame:
    curves = {
        "train/loss": curve(2.3 * np.exp(-np.arange(points) / 150)),
        "val/loss": curve([2.0, 1.2, 0.7, 0.5], first=100),
        "val/acc": curve([0.2, 0.5, 0.8, 0.9], first=100),
        "step/lr": curve(np.full(points, 1e-3)),
    }
    return frame(curves=curves, curve_names=NAMES)


def many_names(*names: str) -> Frame:
    """A frame in which each metric has a curve of its own."""
    curves = {name: curve(np.arange(50.0) + n) for n, name in enumerate(names)}
    return frame(curves=curves, curve_names=names, snapshot=snapshot(metrics={}))


def at(home: Path, run: Frame | None = None) -> OneRunAt:
    return OneRunAt(home, Script(run or many()))


def titles(screen: RunScreen) -> list[str]:
    charts = [c for c in screen.query("#metric-grid Chart") if c.display]
    return [c.view_model.title for c in charts if isinstance(c, Chart) and c.view_model is not None]


def subtitle(screen: RunScreen, panel: str = "#loss") -> str:
    return str(screen.query_one(panel, Panel).border_subtitle)


async def chooser(pilot: Pilot[Any], *keys: str) -> OptionList:
    """Open the list of metrics, and press some keys in it."""
    await pilot.press("m")
    listed = (await reached(pilot, MetricChooser)).query_one(OptionList)
    await pilot.press(*keys)
    return listed


async def test_metrics_are_chosen_filtered_and_remembered(home: Path) -> None:
    async with one_run(at(home)) as (pilot, app, screen):
        assert titles(screen) == ["loss"]
        listed = await chooser(pilot)
        assert listed.option_count == len(NAMES)
        rows = [str(option.prompt).split() for option in listed.options]
        assert [row[1] for row in rows if row[0] == "[x]"] == ["train/loss", "val/loss"]
        await pilot.press("space")  # the first: the learning rate
        # A filter takes letters that are keys elsewhere, and a wrong expression says where.
        await pilot.press("slash", *"d q/")
        assert app.screen.query_one(Input).value == "d q/"
        await pilot.press(*["backspace"] * 4, *"/[a")
        problem = app.screen.query_one("#problem", Static)
        await until(pilot, lambda: "at character 2" in str(problem.visual))
        await pilot.press(*["backspace"] * 3, *"acc")
        await until(pilot, lambda: listed.option_count == 1)
        await pilot.press("down", "space", "enter")
        await until(pilot, lambda: app.screen is screen)
        assert titles(screen) == ["loss", "step/lr", "acc"]
        assert screen._requests.request.names == frozenset(NAMES)
        assert read_preferences(home)["metrics"] == {
            "cifar10-cnn": ["train/loss", "val/loss", "step/lr", "val/acc"]
        }
    async with one_run(at(home)) as (pilot, app, screen):
        assert titles(screen) == ["loss", "step/lr", "acc"]
        await chooser(pilot, "escape")
        await until(pilot, lambda: app.screen is screen)
        await chooser(pilot, "d")
        await until(pilot, lambda: app.screen is screen)
        assert titles(screen) == ["loss"]
        assert read_preferences(home)["metrics"] == {}


async def test_the_metrics_to_choose_are_described_in_full_at_80_columns(home: Path) -> None:
    names = tuple(DESCRIPTIONS)
    run = frame(curves={}, curve_names=names)
    async with one_run(at(home, run), (80, 24)) as (pilot, app, _):
        listed = await chooser(pilot)
        await until(pilot, lambda: listed.option_count == len(names))
        await pilot.pause()
        lines = [listed.render_line(y).text for y in range(listed.size.height)]
        assert not [line for line in lines if "…" in line]
        assert app.screen.query_one("#answers").size.height == 1
        # Each takes one line of a narrow list.
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert listed.virtual_size.height == listed.option_count == len(names)


async def test_charts_zoom_together_and_say_what_is_in_view(home: Path) -> None:
    async with one_run(at(home)) as (pilot, _, screen):
        loss = screen.query_one("#loss-chart", Chart)
        rates = screen.query_one("#throughput-chart", Chart)
        loss.focus()
        await pilot.press("left", "up", "up", "up", "shift+left")
        await until(pilot, lambda: rates.view is not None)
        assert rates.view == loss.view
        for panel in ("#loss", "#throughput"):
            assert "zoomed " in subtitle(screen, panel)
            assert "home: all" in subtitle(screen, panel)
        part = required(loss.zoomed_range())
        first, last = required(screen._requests.request.steps)
        assert first <= part.low
        assert last >= part.high
        rates.focus()
        await pilot.press("home")
        await until(pilot, lambda: loss.view is None)
        assert screen._requests.request.steps is None
        await until(pilot, lambda: "zoomed" not in subtitle(screen))


async def test_the_keys_of_charts_are_named_while_one_has_the_focus_and_are_for_all(
    home: Path,
) -> None:
    async with one_run(at(home)) as (pilot, _, screen):

        def words() -> set[str]:
            return {hint.words for hint in screen.query_one(KeyFooter)._hints}

        await pilot.press("4")
        await until(pilot, lambda: "crosshair" not in words())
        grid = list(screen.query("#metric-grid Chart").results(Chart))
        await pilot.press("o", "y")
        assert all(chart.outliers and chart.is_log for chart in grid)
        screen.query_one(RunCharts).reset()
        assert not any(chart.outliers or chart.is_log for chart in grid)
        await pilot.press("2")
        await until(pilot, lambda: {"zoom", "crosshair", "show all", "metrics"} <= words())


async def test_charts_without_room_are_counted(home: Path) -> None:
    names = [f"metric-{n}" for n in range(9)]
    async with one_run(at(home, many_names(*names))) as (pilot, _, screen):
        screen.charts._use_first(MetricChoice(tuple(names)))
        await until(pilot, lambda: len(titles(screen)) > 1)
        before = len(titles(screen))
        assert f"{len(names) - before} more need" in subtitle(screen)
        await pilot.press("1", "z")
        await until(pilot, lambda: len(titles(screen)) > before)


async def test_several_metrics_share_the_first_chart_and_the_second_panel(home: Path) -> None:
    first = ["train/loss, val/loss, step/lr"]

    def second(screen: RunScreen) -> str:
        view_model = screen.query_one("#throughput-chart", Chart).view_model
        return "" if view_model is None else view_model.title

    async with one_run(at(home)) as (pilot, _, screen):
        await chooser(pilot, "space", "j", "enter")
        await until(pilot, lambda: titles(screen) == first)
        await pilot.press("2")
        listed = await chooser(pilot, "slash", *"/acc$/")
        await until(pilot, lambda: listed.option_count == 1)
        await pilot.press("down", "space", "enter")
        await until(pilot, lambda: "val/acc" in second(screen))
    async with one_run(at(home)) as (pilot, _, screen):
        assert titles(screen) == first
        await until(pilot, lambda: "val/acc" in second(screen))


async def test_panel_1_shows_every_metric_in_small_charts_if_wanted(home: Path) -> None:
    names = [f"layer.{n:02}" for n in range(40)]
    of_layers = many_names(*names)
    async with one_run(at(home, of_layers)) as (pilot, _, screen):
        await chooser(pilot, "a")
        await until(pilot, lambda: len(titles(screen)) == 6)
        small = titles(screen)
        assert small == names[: len(small)]
        assert screen._requests.request.names == frozenset(small)
        assert f"{40 - len(small)} more (M: all)" in subtitle(screen)
        # Favourites of the screen of all metrics come first here, too.
        await pilot.press("M")
        (await reached(pilot, MetricsScreen)).charts.go_to("layer.39")
        await pilot.press("asterisk", "q")
        await until(pilot, lambda: titles(screen) == ["layer.39", *small[:-1]])
    async with one_run(at(home, of_layers)) as (pilot, _, screen):
        await until(pilot, lambda: titles(screen) == ["layer.39", *small[:-1]])
        await chooser(pilot, "d")
        await until(pilot, lambda: len(titles(screen)) < len(small))
        visible = [chart for chart in screen.query("#metric-grid Chart") if chart.display]
        assert not any(chart.border_title for chart in visible)


async def test_small_charts_follow_the_size_of_the_panel(home: Path) -> None:
    run = many_names(*(f"layer.{n:02}" for n in range(40)))
    async with one_run(at(home, run), (80, 24)) as (pilot, _, screen):
        screen.charts._use_first(MetricChoice(every=True))
        await until(pilot, lambda: len(titles(screen)) == 6)
        await pilot.resize_terminal(160, 50)
        await pilot.press("1", "z")
        await until(pilot, lambda: len(titles(screen)) == 28)
