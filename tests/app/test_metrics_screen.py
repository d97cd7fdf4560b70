"""The screen of all metrics under keys: pages, filter, order, favourites, one chart, export."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from textual._compositor import Compositor
from textual.pilot import Pilot
from textual.widgets import Input, Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.live.frame import Frame
from ltui.app.presentation.metric_charts import ChartSettings
from ltui.app.screens.help import HelpScreen
from ltui.app.screens.metrics import MetricsScreen
from ltui.app.screens.run import RunScreen
from ltui.app.settings import read_preferences
from ltui.training.state.run_snapshot import MetricValue
from ltui.widgets.charts.chart import Chart
from tests.app.frames import curve, frame, snapshot
from tests.app.one_run import OneRun, OneRunAt, Script, noticed, one_run, reached, settled, until
from tests.app.test_keys import unknown_hints

COUNT = 100


def many(count: int = COUNT) -> Frame:
    names = [f"layer.{n:03}/grad_norm" for n in range(count - 2)]
    names += ["gpu/0/power_w", "throughput/samples_per_s"]
    curves = {name: curve(np.arange(50.0) + n) for n, name in enumerate(names)}
    steps = {name: MetricValue(last=1.0, step=n) for n, name in enumerate(names)}
    return frame(curves=curves, curve_names=tuple(sorted(curves)), snapshot=snapshot(metrics=steps))


@asynccontextmanager
async def all_metrics(
    home: Path, source: Frame | Script | None = None, *, size: tuple[int, int] = (160, 50)
) -> AsyncIterator[tuple[Pilot[Any], OneRun, MetricsScreen]]:
    """Yield pilot, app and screen, once the first charts are shown."""
    home.joinpath("runs").mkdir(exist_ok=True)
    script = source if isinstance(source, Script) else Script(source or many())
    async with one_run(OneRunAt(home, script), size) as (pilot, app, _):
        await pilot.press("M")
        screen = await reached(pilot, MetricsScreen)
        await until(pilot, lambda: charts(app) and isinstance(screen.focused, Chart))
        yield pilot, app, screen


def footer(app: OneRun) -> str:
    return str(app.screen.query_one(KeyFooter).render())


def charts(app: OneRun) -> list[str]:
    shown_charts = [c for c in app.screen.query(Chart) if c.display and c.view_model is not None]
    return [c.view_model.title for c in shown_charts if c.view_model is not None]


def line(app: OneRun) -> str:
    return str(app.screen.query_one("#page", Static).visual)


async def test_opened_before_the_first_values_it_has_its_keys(tmp_path: Path) -> None:
    """They went into the field of the filter, which nobody saw."""
    values = Event()

    class Slow(Script):
        def poll(self, now: float, now_ns: int) -> Frame:
            values.wait(60)
            return super().poll(now, now_ns)

    tmp_path.joinpath("runs").mkdir()
    app = OneRunAt(tmp_path, Slow(many()))
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.press("M")
        screen = await reached(pilot, MetricsScreen)
        await until(pilot, lambda: screen.is_mounted)
        await pilot.pause()
        values.set()
        await until(pilot, lambda: len(charts(app)) == 12)
        first = charts(app)
        await pilot.press("n")
        await until(pilot, lambda: charts(app) != first)


async def test_only_the_visible_charts_are_requested_and_pages_turn(tmp_path: Path) -> None:
    async with all_metrics(tmp_path) as (pilot, app, screen):
        assert len(charts(app)) == 12
        assert line(app).startswith("brave-owl · page 1/9 · 100 metrics")
        first = charts(app)
        assert screen._requests.request.names == frozenset(first)
        await pilot.press("n")
        await until(pilot, lambda: charts(app) != first)
        assert len(screen.query(Chart)) == 12
        assert screen._requests.request.names == frozenset(charts(app))
        await pilot.press("N", "N")
        await until(pilot, lambda: charts(app) == first)
        assert unknown_hints(screen) == []
        # One chart fills the screen, and pages become metrics.
        await pilot.press("z")
        await until(pilot, lambda: charts(app) == first[:1])
        assert "z all charts" in footer(app)
        assert "columns" not in footer(app)
        await pilot.press("n")
        await until(pilot, lambda: charts(app) == first[1:2])
        await pilot.press("escape")
        await until(pilot, lambda: charts(app) == first)
        assert "< > columns" in footer(app)


async def test_a_small_terminal_shows_four_charts_and_rows_and_columns_change(
    tmp_path: Path,
) -> None:
    async with all_metrics(tmp_path, size=(80, 24)) as (pilot, app, _):
        assert len(charts(app)) == 4
        await pilot.press("right_parenthesis", "less_than_sign")
        await until(pilot, lambda: len(charts(app)) == 3)
        stored = read_preferences(tmp_path)["all_metrics"]["cifar10-cnn"]
        assert (stored["columns"], stored["rows"]) == (1, 3)
        await pilot.press("0")
        await until(pilot, lambda: len(charts(app)) == 4)


async def test_filter_order_and_favourites_are_remembered_and_a_wrong_expression_says_where(
    tmp_path: Path,
) -> None:
    async with all_metrics(tmp_path) as (pilot, app, screen):
        await pilot.press("slash", *"/layer(")
        await until(pilot, lambda: "wrong at character 7" in line(app))
        assert len(charts(app)) == 12
        assert isinstance(screen.focused, Input)
        await pilot.press(*["backspace"] * 7, *"/00[1-3]")
        await until(pilot, lambda: len(charts(app)) == 3)
        await pilot.press("enter", "asterisk", "O")
        await until(pilot, lambda: charts(app)[0].startswith("★"))
        assert [title[-13:-10] for title in charts(app)] == ["001", "003", "002"]
    async with all_metrics(tmp_path) as (pilot, again, screen):
        assert [title[-13:-10] for title in charts(again)] == ["001", "003", "002"]
        assert "3 of 100" in line(again)
        await pilot.press("escape")
        await until(pilot, lambda: len(charts(again)) == 12)
        assert again.screen is screen
        await pilot.press("escape")
        await reached(pilot, RunScreen)


async def test_new_metrics_appear_and_the_order_stays(tmp_path: Path) -> None:
    script = Script(replace(many(3), curve_names=("layer.000/grad_norm",)))
    async with all_metrics(tmp_path, script) as (pilot, app, _):
        assert line(app).startswith("brave-owl · page 1/1 · 1 metric ·")
        for version, more in enumerate(([], [1.0, 2.0]), 1):
            before, run = charts(app), many(4)
            new = {"a/new\x1b[31m": curve(more)} if more else {}
            curves = {**run.curves, **new}
            names = tuple(sorted(curves))
            script.frame = replace(run, curves=curves, curve_names=names, curves_version=version)
            count = 3 + version
            await until(pilot, lambda count=count: len(charts(app)) == count)  # type: ignore[misc]
        assert charts(app) == ["a/new", *before]


async def test_crosshair_and_zoom_are_linked_over_all_charts(tmp_path: Path) -> None:
    async with all_metrics(tmp_path) as (pilot, app, screen):
        await pilot.press("left", "left", "up")
        every = [c for c in screen.query(Chart) if c.display]
        await until(pilot, lambda: len({c.crosshair for c in every}) == 1)
        assert every[0].crosshair is not None
        await until(pilot, lambda: len({c.view for c in every}) == 1)
        assert every[0].view is not None
        assert "zoomed" in line(app)
        await pilot.press("greater_than_sign")
        await until(pilot, lambda: len(charts(app)) > len(every))
        assert {c.view for c in screen.query(Chart)} == {every[0].view}


async def test_a_chart_is_saved_with_title_axes_and_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ltui-brave-owl-layer.000-grad_norm"
    async with all_metrics(tmp_path) as (pilot, app, _):
        await pilot.press("w", "w", "W", "Y")
        for name in (f"{path}.svg", f"{path}-2.svg", f"{path}.png"):
            await until(pilot, Path(name).exists)
        assert app.clipboard.startswith("layer.000/grad_norm\n")
        await noticed(pilot, app, f"{path.name}.png")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "PIL", None)
            await pilot.press("W")
            await noticed(pilot, app, "install pillow")
    assert len(list(tmp_path.glob("*.png"))) == 1
    assert Image.open(f"{path}.png").size == (1920, 1080)
    elements = ElementTree.parse(f"{path}.svg").iter()
    texts = [one.text or "" for one in elements if one.tag.endswith("text")]
    assert "brave-owl: layer.000/grad_norm" in texts
    assert "step" in texts
    assert any(text.startswith("smoothed") for text in texts)


async def test_only_changed_cells_are_painted_while_the_run_screen_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(many())
    async with all_metrics(tmp_path, script) as (pilot, app, screen):
        await settled(pilot)
        painted: list[str] = []
        for kind in ("render_full_update", "render_partial_update"):
            paint = getattr(Compositor, kind)

            def record(
                self: Compositor, *, kind: str = kind, paint: Any = paint, **options: Any
            ) -> Any:
                painted.append(kind)
                return paint(self, **options)

            monkeypatch.setattr(Compositor, kind, record)
        for version in range(1, 4):
            one = many()
            name = charts(app)[-1]
            changed = {**one.curves, name: curve(np.arange(50.0) * version)}
            script.frame = replace(one, curves=changed, curves_version=version)
            await until(pilot, lambda: app.run_screen.frame is script.frame)
            await pilot.pause(0.1)
        assert "render_partial_update" in painted
        assert "render_full_update" not in painted
        assert not app.run_screen.is_current
        await pilot.press("question_mark")
        await reached(pilot, HelpScreen)
        assert screen.is_current, "it is seen beside the help"


async def test_choices_are_the_same_on_both_screens_and_remembered(tmp_path: Path) -> None:
    async with all_metrics(tmp_path) as (pilot, app, screen):
        await pilot.press("x", "minus", "2", "tab", "1")
        chosen = screen.charts.settings
        await pilot.press("q")
        await until(pilot, lambda: app.screen is app.run_screen)
        assert (chosen.axis, chosen.smoothing) == ("epoch", 0.8)
        settings = app.run_screen.charts.settings
        assert settings.axis == "epoch"
        # A metric went to each of the two panels of the run.
        assert settings.second == ("layer.000/grad_norm",)
        assert "layer.001/grad_norm" in (settings.metrics or ())
        await pilot.press("x")
        assert app.run_screen.charts.settings.axis == "time"
    async with all_metrics(tmp_path) as (pilot, again, screen):
        for settings in (screen.charts.settings, again.run_screen.charts.settings):
            assert (settings.axis, settings.smoothing) == ("time", 0.8)
        await pilot.press("0", "q")
        await until(pilot, lambda: again.screen is again.run_screen)
        assert again.run_screen.charts.settings.axis == "step"
    assert read_preferences(tmp_path)["charts"] == {}


@pytest.mark.parametrize(
    "stored", [7, {"axis": []}, {"axis": "bananas", "smoothing": "much"}, {"smoothing": math.nan}]
)
def test_damaged_settings_of_charts_are_left_out(stored: object) -> None:
    settings = ChartSettings(axis="time", smoothing=0.5)
    assert settings.with_json(stored) == settings


async def test_a_star_and_the_scale_belong_to_the_metric_not_to_the_place(tmp_path: Path) -> None:
    async with all_metrics(tmp_path) as (pilot, app, screen):
        first = charts(app)
        await pilot.press("y", "o", "asterisk")
        await until(pilot, lambda: charts(app) == [f"★ {first[0]}", *first[1:]])
        await pilot.press("n")
        await until(pilot, lambda: first[1] not in charts(app))
        board = screen.charts
        assert not any(chart.is_log or chart.outliers for chart in board.grid.charts)
        await pilot.press("N", "tab", "asterisk", "O")
        await until(pilot, lambda: charts(app)[1] == f"★ {first[1]}")
        assert [chart.is_log for chart in board.grid.charts] == [True] + 11 * [False]
        await pilot.press("0")
        assert not any(chart.is_log or chart.outliers for chart in board.grid.charts)
        await pilot.press("y")
        board.turn(1)
        board.turn(-1)
        assert sum(chart.is_log for chart in board.grid.charts) == 1
