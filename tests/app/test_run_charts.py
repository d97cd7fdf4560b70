"""The charts of a run screen under keys: choice of metrics, linked zoom, detail on request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart import Chart
from ltui.widgets.view_models import ChartViewModel
from tests.app.frames import curve, frame, snapshot
from tests.app.one_run import OneRun, Script, one_run, until

NAMES = ("step/lr", "train/loss", "val/acc", "val/loss")
many_chart = ChartViewModel(title="")


class OneRunAt(OneRun):
    """The run in a home of its own, where a choice can be remembered."""

    def __init__(self, home: Path, script: Script) -> None:
        super().__init__(script)
        self.run_dir = RunDir(home / "runs" / "brave-owl-3f2a")

    def get_default_screen(self) -> RunScreen:
        return RunScreen(self.run_dir, alone=True, make_poller=lambda: self.script)


def many(points: int = 400) -> Frame:
    curves = {
        "train/loss": curve(2.3 * np.exp(-np.arange(points) / 150)),
        "val/loss": curve([2.0, 1.2, 0.7, 0.5], first=100),
        "val/acc": curve([0.2, 0.5, 0.8, 0.9], first=100),
        "step/lr": curve(np.full(points, 1e-3)),
    }
    return frame(curves=curves, curve_names=NAMES)


def titles(screen: RunScreen) -> list[str]:
    charts = [c for c in screen.query("#metric-grid Chart") if c.display]
    return [c.view_model.title for c in charts if isinstance(c, Chart) and c.view_model is not None]


async def test_metrics_are_chosen_filtered_and_remembered(tmp_path: Path) -> None:
    tmp_path.joinpath("runs").mkdir()
    async with one_run(OneRunAt(tmp_path, Script(many()))) as (pilot, app, screen):
        assert titles(screen) == ["loss"]
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        listed = app.screen.query_one(OptionList)
        assert listed.option_count == len(NAMES)
        rows = [str(option.prompt).split() for option in listed.options]
        assert [row[1] for row in rows if row[0] == "[x]"] == ["train/loss", "val/loss"]
        await pilot.press("space")  # the first: the learning rate
        await pilot.press("slash", *"acc")
        await until(pilot, lambda: listed.option_count == 1)
        await pilot.press("down", "space", "enter")
        await until(pilot, lambda: app.screen is screen)
        assert titles(screen) == ["loss", "step/lr", "acc"]
        requests = screen._requests
        assert requests.request.names == frozenset(NAMES)
        assert read_preferences(tmp_path)["metrics"] == {
            "cifar10-cnn": ["train/loss", "val/loss", "step/lr", "val/acc"]
        }
    async with one_run(OneRunAt(tmp_path, Script(many()))) as (pilot, again, screen):
        assert titles(screen) == ["loss", "step/lr", "acc"]
        await pilot.press("m")
        await until(pilot, lambda: isinstance(again.screen, MetricChooser))
        await pilot.press("d")
        await until(pilot, lambda: again.screen is screen)
        assert titles(screen) == ["loss"]
        assert read_preferences(tmp_path)["metrics"] == {}


async def test_the_metrics_to_choose_are_described_in_full_at_80_columns(tmp_path: Path) -> None:
    names = tuple(DESCRIPTIONS)
    script = Script(frame(curves={}, curve_names=names))
    async with one_run(OneRunAt(tmp_path, script), (80, 24)) as (pilot, app, _):
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        listed = app.screen.query_one(OptionList)
        await until(pilot, lambda: listed.option_count == len(names))
        await pilot.pause()
        lines = [listed.render_line(y).text for y in range(listed.size.height)]
        assert not [line for line in lines if "…" in line]
        assert app.screen.query_one("#answers").size.height == 1


async def test_a_filter_takes_letters_that_are_keys_elsewhere(tmp_path: Path) -> None:
    async with one_run(OneRunAt(tmp_path, Script(many())), (100, 30)) as (pilot, app, screen):
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        await pilot.press("slash", *"d q/")
        assert app.screen.query_one(Input).value == "d q/"
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)


async def test_charts_zoom_together_and_say_what_is_in_view(tmp_path: Path) -> None:
    async with one_run(OneRunAt(tmp_path, Script(many()))) as (pilot, _, screen):
        loss = screen.query_one("#loss-chart", Chart)
        rates = screen.query_one("#throughput-chart", Chart)
        loss.focus()
        await pilot.press("left", "up", "up", "up", "shift+left")
        await until(pilot, lambda: rates.view is not None)
        assert rates.view == loss.view
        for panel in ("#loss", "#throughput"):
            subtitle = screen.query_one(panel, Panel).border_subtitle or ""
            assert "zoomed " in subtitle
            assert "home: all" in subtitle
        part = loss.zoomed_range()
        asked = screen._requests.request.steps
        assert part is not None
        assert asked is not None
        assert asked[0] <= part.low
        assert asked[1] >= part.high
        rates.focus()
        await pilot.press("home")
        await until(pilot, lambda: loss.view is None)
        assert screen._requests.request.steps is None
        loss_panel = screen.query_one("#loss", Panel)
        await until(pilot, lambda: "zoomed" not in (loss_panel.border_subtitle or ""))


async def test_the_footer_names_the_keys_of_the_chart_that_has_the_focus(tmp_path: Path) -> None:
    async with one_run(OneRunAt(tmp_path, Script(many()))) as (pilot, _, screen):

        def words() -> set[str]:
            return {hint.words for hint in screen.query_one(KeyFooter)._hints}

        await pilot.press("4")
        await until(pilot, lambda: "crosshair" not in words())
        await pilot.press("2")
        await until(pilot, lambda: {"zoom", "crosshair", "show all", "metrics"} <= words())


async def test_outliers_and_scale_are_switched_for_every_metric(tmp_path: Path) -> None:
    async with one_run(OneRunAt(tmp_path, Script(many()))) as (pilot, _, screen):
        charts = screen.query_one(RunCharts)
        grid = list(screen.query("#metric-grid Chart").results(Chart))
        await pilot.press("4", "o", "y")
        assert all(chart.outliers and chart.is_log for chart in grid)
        charts.reset()
        assert not any(chart.outliers or chart.is_log for chart in grid)


async def test_charts_without_room_are_counted(tmp_path: Path) -> None:
    names = [f"metric-{n}" for n in range(9)]
    curves = {name: curve(np.arange(50.0)) for name in names}
    shown_frame = frame(curves=curves, curve_names=tuple(names), snapshot=snapshot(metrics={}))
    async with one_run(OneRunAt(tmp_path, Script(shown_frame))) as (pilot, _, screen):
        charts = screen.query_one(RunCharts)
        charts._use_first(MetricChoice(tuple(names)))
        await until(pilot, lambda: len(titles(screen)) > 1)
        left = len(names) - len(titles(screen))
        assert f"{left} more need" in (screen.query_one("#loss", Panel).border_subtitle or "")
        before = len(titles(screen))
        await pilot.press("1", "z")
        await until(pilot, lambda: len(titles(screen)) > before)


async def test_each_metric_takes_one_line_of_a_narrow_list(tmp_path: Path) -> None:
    async with one_run(OneRunAt(tmp_path, Script(many())), (60, 20)) as (pilot, app, _):
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        listed = app.screen.query_one(OptionList)
        await pilot.pause()
        assert listed.virtual_size.height == listed.option_count == len(NAMES)


async def test_several_metrics_share_the_first_chart_and_the_second_panel(tmp_path: Path) -> None:
    tmp_path.joinpath("runs").mkdir()
    async with one_run(OneRunAt(tmp_path, Script(many()))) as (pilot, app, screen):
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        await pilot.press("space", "j", "enter")
        await until(pilot, lambda: titles(screen) == ["train/loss, val/loss, step/lr"])
        await pilot.press("2", "m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        await pilot.press("slash", *"/acc$/")
        listed = app.screen.query_one(OptionList)
        await until(pilot, lambda: listed.option_count == 1)
        await pilot.press("down", "space", "enter")
        second = screen.query_one("#throughput-chart", Chart)
        await until(pilot, lambda: "val/acc" in (second.view_model or many_chart).title)
    async with one_run(OneRunAt(tmp_path, Script(many()))) as (pilot, _, screen):
        assert titles(screen) == ["train/loss, val/loss, step/lr"]
        second = screen.query_one("#throughput-chart", Chart)
        await until(pilot, lambda: "val/acc" in (second.view_model or many_chart).title)


async def test_a_wrong_expression_in_the_list_says_where(tmp_path: Path) -> None:
    async with one_run(OneRunAt(tmp_path, Script(many())), (100, 30)) as (pilot, app, _):
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        await pilot.press("slash", *"/[a")
        problem = app.screen.query_one("#problem", Static)
        await until(pilot, lambda: "at character 2" in str(problem.visual))


async def test_panel_1_shows_every_metric_in_small_charts_if_wanted(tmp_path: Path) -> None:
    tmp_path.joinpath("runs").mkdir()
    curves = {f"layer.{n:02}": curve(np.arange(50.0) + n) for n in range(40)}
    of_layers = frame(curves=curves, curve_names=tuple(curves))
    async with one_run(OneRunAt(tmp_path, Script(of_layers))) as (pilot, app, screen):
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MetricChooser))
        await pilot.press("a")
        await until(pilot, lambda: len(titles(screen)) == 6)
        small = titles(screen)
        assert small == list(curves)[: len(small)]
        assert screen._requests.request.names == frozenset(small)
        panel = screen.query_one("#loss", Panel)
        assert f"{40 - len(small)} more (M: all)" in str(panel.border_subtitle)
        # Favourites of the screen of all metrics come first here, too.
        await pilot.press("M")
        await until(pilot, lambda: isinstance(app.screen, MetricsScreen))
        assert isinstance(app.screen, MetricsScreen)
        app.screen.charts.go_to("layer.39")
        await pilot.press("asterisk", "q")
        await until(pilot, lambda: titles(screen) == ["layer.39", *small[:-1]])
    async with one_run(OneRunAt(tmp_path, Script(of_layers))) as (pilot, again, screen):
        await until(pilot, lambda: titles(screen) == ["layer.39", *small[:-1]])
        await pilot.press("m")
        await until(pilot, lambda: isinstance(again.screen, MetricChooser))
        await pilot.press("d")
        await until(pilot, lambda: len(titles(screen)) < len(small))
        visible = [chart for chart in screen.query("#metric-grid Chart") if chart.display]
        assert not any(chart.border_title for chart in visible)


async def test_small_charts_follow_the_size_of_the_panel(tmp_path: Path) -> None:
    tmp_path.joinpath("runs").mkdir()
    curves = {f"layer.{n:02}": curve(np.arange(50.0) + n) for n in range(40)}
    script = Script(frame(curves=curves, curve_names=tuple(curves)))
    async with one_run(OneRunAt(tmp_path, script), (80, 24)) as (pilot, _, screen):
        screen.charts._use_first(MetricChoice(every=True))
        await until(pilot, lambda: len(titles(screen)) == 6)
        await pilot.resize_terminal(160, 50)
        await pilot.press("1", "z")
        await until(pilot, lambda: len(titles(screen)) == 28)
