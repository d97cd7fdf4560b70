"""The comparison on the screen: curves, tables, groups, and runs that go on meanwhile."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textual.pilot import Pilot

from ltui.app.compare.comparison import Comparison
from ltui.app.keys.footer import KeyFooter
from ltui.app.panels.comparison_widgets import ComparisonTable, ParallelChart
from ltui.app.panels.linked_charts import MetricGrid
from ltui.app.panels.panel import TabBar
from ltui.app.screens.choosers import MetricChooser
from ltui.app.screens.compare import CompareScreen
from ltui.app.screens.palette import read_places
from ltui.app.screens.run import RunScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_directory import RunDir, list_runs
from ltui.widgets.charts.chart import Chart
from ltui.widgets.charts.chart_options import sign_of
from ltui.widgets.view_models import ChartSeries, ChartViewModel
from tests.app.one_run import noticed, notices, reached, until
from tests.compare.stored_runs import (
    BEGAN,
    STEP_S,
    config,
    losses,
    write_run,
    write_seeds,
    write_steps,
)
from tests.required import required

BIG, SMALL = (160, 50), (80, 24)


class Opened:
    """The screen that compares all runs of a home directory, driven by a pilot."""

    def __init__(self, pilot: Pilot[Any], screen: CompareScreen) -> None:
        self.pilot, self.screen = pilot, screen
        self.press = pilot.press

    @property
    def comparison(self) -> Comparison:
        return required(self.screen.comparison)

    def chart(self, number: int = 0) -> ChartViewModel:
        return required(list(self.screen.query(Chart))[number].view_model)

    def series(self) -> list[ChartSeries]:
        """The clear curves of the first chart."""
        return [series for series in self.chart().series if not series.dim]

    def table(self, name: str = "runs") -> ComparisonTable:
        return self.screen.query_one(f"#{name}-table", ComparisonTable)

    def column(self, key: str, name: str = "runs") -> list[str]:
        rows = self.table(name).rows
        return ["".join(c.text for c in row.cells[key]).strip() for row in rows]

    def parallel(self) -> str:
        return self.screen.query_one(ParallelChart).plain_text()

    def caption(self, panel: str = "curves") -> str:
        return str(self.screen.query_one(f"#{panel}").border_subtitle)


@asynccontextmanager
async def opened(
    home: Path, size: tuple[int, int] = BIG, *, readonly: bool = False, **options: Any
) -> AsyncIterator[Opened]:
    """Compare all runs; ``options`` of the screen."""
    runs = sorted(list_runs(home), key=lambda run: run.id)
    app = LtuiApp(home, first=lambda: CompareScreen(runs, **options), readonly=readonly)
    async with app.run_test(size=size) as pilot:
        screen = await reached(pilot, CompareScreen)
        await until(pilot, lambda: screen.comparison is not None)
        yield Opened(pilot, screen)


@pytest.fixture
def home(private_home: Path) -> Path:
    """A home with three runs of one learning rate and two of another one."""
    write_seeds(private_home)
    return private_home


async def test_every_run_is_a_curve_with_its_sign_beside_it(home: Path) -> None:
    async with opened(home) as it:
        colours = it.comparison.colours
        await it.press("n")  # from val/acc to train/loss
        assert {s.name: s.colour for s in it.series()} == {
            f"{it.comparison.names[run_id]} smoothed": colour for run_id, colour in colours.items()
        }
        # The reference is drawn over the others.
        assert it.series()[-1].name == "brave-owl smoothed"
        assert sorted(it.column("sign")) == sorted(map(sign_of, colours.values()))
        settings = it.table("settings").rows
        assert [row.key for row in settings][:2] == ["seed_everything", "model.lr"]
        lr = settings[1].cells
        assert "".join(cell.text for cell in lr["setting"]).startswith("≠ ")
        assert lr["eager-owl-0003"][0].text == "0.3"


async def test_keys_hide_pin_sort_and_align(home: Path) -> None:
    async with opened(home) as it:
        await it.press("n", "down", "space")
        assert "calm-owl smoothed" not in [series.name for series in it.series()]
        assert it.column("sign")[1] == "·"
        await it.press("space", "p")
        assert it.column("run")[1] == "calm-owl ◂ reference"
        assert it.series()[-1].name == "calm-owl smoothed"
        assert it.column("delta")[1] == ""
        await it.press("s", "s")
        best = [float(text) for text in it.column("best")]
        assert best == sorted(best)
        steps = it.series()[0].x
        await it.press("x", "x")
        assert it.comparison.axis == "time"
        assert it.series()[0].x[-1] < steps[-1]
        await it.press("x")
        assert it.comparison.axis == "step"
        await it.press("n")
        assert it.chart().title == "val/acc"


async def test_groups_are_one_curve_and_members_come_on_demand_sorted(home: Path) -> None:
    async with opened(home) as it:
        await it.press("G")
        assert [series.name for series in it.series()] == ["lr=0.1 (3)", "lr=0.3 (2)"]
        assert "mean, min to max; faint: fewer runs" in it.caption()

        def ranges() -> Any:
            first = it.series()[0]
            return required(first.high) - required(first.low)

        before = ranges()
        assert (before >= 0).all()
        assert it.column("run") == ["▸ lr=0.1 (3 runs)", "▸ lr=0.3 (2 runs)"]
        assert it.column("setting seed_everything") == ["3 values", "2 values"]
        await it.press("enter")
        assert it.column("run")[1:4] == ["brave-owl ◂ reference", "calm-owl", "deep-owl"]
        await it.press("B", "B")
        assert not np.allclose(ranges(), before)
        await it.press("s", "s")
        best = [float(text) for text in it.column("best")]
        # A higher accuracy is better, so the best one comes first.
        assert it.column("run")[0].startswith("▸ lr=0.3")
        assert best[:2] == sorted(best[:2], reverse=True)
        assert best[2:] == sorted(best[2:], reverse=True)
        await it.press("S")
        assert [float(text) for text in it.column("best")][1:4] == best[:1:-1]
        assert "best ▴" in [column.title for column in it.table().columns_of(())]
        (title,) = [one for one in it.table()._placed if one.column.key == "final"]
        for is_reversed in (False, True):
            await it.pilot.click(it.table(), offset=(title.x + 4, 0))
            await until(it.pilot, lambda: it.screen.settings.order == "final")
            await until(it.pilot, lambda up=is_reversed: it.screen.settings.reversed is up)  # type: ignore[misc]


async def test_keys_change_all_charts_and_the_axis_suits_the_shown_runs(private_home: Path) -> None:
    fall = [10.0 ** (-4 * n / 300) for n in range(300)]
    metrics = {"val/loss": dict(enumerate(fall, start=1))}
    for name, values in (("brave", fall), ("calm", [1.0] * 300)):
        settings = config(lr=0.1, seed=len(name))
        write_run(private_home, f"{name}-owl-0001", values, configuration=settings, metrics=metrics)
    async with opened(private_home) as it:
        charts = list(it.screen.query(Chart))
        assert [chart.is_log for chart in charts] == [True, True]
        await it.press("1", "y", "o")
        assert [(chart.is_log, chart.outliers) for chart in charts] == [(False, True)] * 2
        await it.press("left")
        assert charts[0].crosshair == charts[1].crosshair != None  # noqa: E711
        # Without the run that falls, the chart of the training loss has a linear axis.
        await it.press("escape", "2", "home", "space")
        views = {c.view_model.title: c.view_model.log_y for c in charts if c.view_model}
        assert views == {"train/loss": False, "val/loss": True}


async def test_parameters_show_the_run_under_the_cursor_of_either_table(home: Path) -> None:
    async with opened(home) as it:
        await it.press("down", "4")
        shown = [panel.id for panel in it.screen.query("Panel") if panel.display]
        assert shown == ["parameters", "runs", "settings"]
        assert it.table("parameters").cursor_key == "calm-owl-0001"
        sign = sign_of(it.comparison.colours["calm-owl-0001"])
        await it.pilot.pause()
        # On the axes of lr, seed and loss, and beside the last one.
        assert it.parallel().count(sign) == 4
        assert "final" not in it.parallel()
        await it.press("v", "down", "down")
        assert "final" in it.parallel()
        assert it.table("runs").cursor_key == "eager-owl-0003"
        await it.press("s", "s", "s")
        assert it.screen.settings.order == "setting seed_everything"
        seeds = it.column("setting seed_everything", "parameters")
        assert seeds == sorted(seeds)
        height = it.screen.query_one(ParallelChart).size.height
        await it.pilot.click(ParallelChart, offset=(1, height - 1))
        clicked = required(it.table("parameters").cursor_key)
        # The foot of the first axis is the lower learning rate.
        assert it.comparison.by_id[clicked].settings["model.lr"] == "0.1"
        await it.press("G", "home")
        assert "3 values" in it.column("setting seed_everything", "parameters")
        await it.press("1")
        assert not it.screen.query_one("#parameters").display


async def test_charts_show_the_marks_of_the_run_under_the_cursor(private_home: Path) -> None:
    runs = write_seeds(private_home)
    store = StoreWriter(runs[1].db_path)
    # A minute after the end of the first attempt, and 500 steps before it.
    began = BEGAN + 1400 * STEP_S + 60
    store.begin_attempt(
        2, started_at=began, boot_id="b", resumed_path="a.ckpt", resumed_step=900, changes=("lr",)
    )
    store.close()
    async with opened(private_home) as it:
        assert not it.chart().marks
        await it.press("down")
        await until(it.pilot, lambda: len(it.chart().marks) == 2)
        assert [(mark.at, mark.sign, mark.text) for mark in it.chart().marks] == [
            (900, "»", "attempt 2 from step 900"),
            (900, "~", "changed lr"),
        ]
        assert "» attempt  ~ change of calm-owl" in it.caption()
        await it.press("x", "x")
        # Training time excludes the minute between the attempts.
        assert [mark.at for mark in it.chart().marks] == pytest.approx([1400 * STEP_S] * 2)
        await it.press("1", "full_stop")
        assert it.screen.query(Chart).first().crosshair == pytest.approx(1400 * STEP_S)


async def test_a_read_only_dashboard_stores_no_colours(home: Path) -> None:
    async with opened(home, readonly=True):
        assert not any(run.labels_path.exists() for run in list_runs(home))


async def test_parameters_and_charts_are_copied_and_saved_as_soon_as_there_are_any(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copied: list[str] = []
    async with opened(home) as it:
        monkeypatch.setattr(it.screen.app, "copy_to_clipboard", copied.append)
        with monkeypatch.context() as patch:
            patch.setattr(MetricGrid, "charts", [])
            it.screen.action_export("svg")
        await noticed(it.pilot, it.pilot.app, "No chart is shown.")
        assert not list(tmp_path.glob("*.svg"))
        await it.press("n", "w", "Y", "4", "w", "Y")
        await until(it.pilot, lambda: len(copied) == 2)
    assert "train/loss" in copied[0]
    assert "seed_everything" in copied[1]
    files = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert files == ["ltui-parameters-best-train-loss.svg", "ltui-train-loss.svg"]
    assert "brave-owl" in (tmp_path / files[0]).read_text()


async def test_other_metrics_are_chosen_from_the_list(home: Path) -> None:
    async with opened(home) as it:
        assert it.comparison.metrics == ("val/acc", "train/loss")
        await it.press("m")
        await reached(it.pilot, MetricChooser)
        # The list has the names in order; the loss is deselected.
        names = sorted(it.comparison.runs[0].metric_names)
        await it.press(*["down"] * names.index("train/loss"), "space", "enter")
        await until(it.pilot, lambda: it.comparison.metrics == ("val/acc",))
        assert it.chart().title == "val/acc"
        await it.press("m")
        await reached(it.pilot, MetricChooser)
        await it.press("d")
        await until(it.pilot, lambda: len(it.comparison.metrics) == 2)


async def test_runs_without_finite_values_are_gaps_on_every_panel(private_home: Path) -> None:
    write_seeds(private_home, steps=600)
    write_run(private_home, "empty-owl-0009", [], configuration=config(lr=0.7, seed=1))
    odd = {100: math.nan, 200: math.inf, 300: 0.4, 400: -math.inf, 500: math.nan}
    for name, values in (("odd", odd), ("void", dict.fromkeys(odd, math.nan))):
        # The same settings as those of the first group, with another seed.
        settings, metrics = config(lr=0.1, seed=len(name)), {"val/acc": values}
        run_id = f"{name}-owl-0009"
        write_run(private_home, run_id, losses(500), configuration=settings, metrics=metrics)
    async with opened(private_home) as it:
        assert len(it.series()) == 7
        await it.press("minus", "minus", "minus", "minus")
        by_name = {series.name: series for series in it.series()}
        assert np.isfinite(by_name["odd-owl"].y).tolist() == [False, False, True, False, False]
        assert not np.isfinite(by_name["void-owl"].y).any()
        best = dict(zip(it.column("run"), it.column("best"), strict=True))
        assert [best[f"{name}-owl"] for name in ("odd", "void", "empty")] == [
            "0.4000",
            "n/a",
            "n/a",
        ]
        for key in ("x", "x", "x", "4", "end", "v", "v", "G", "B", "B", "B", "s", "s", "s"):
            await it.press(key)
        group = next(series for series in it.series() if series.name == "lr=0.1 (5)")
        assert np.isfinite(group.y).all()
        assert "n/a" in it.parallel()


async def test_a_live_run_goes_on_growing(private_home: Path) -> None:
    values = losses(400)
    runs = [
        write_run(
            private_home, name, values[:200], configuration=config(lr=0.1, seed=1), state=state
        )
        for name, state in (
            *(("brave-owl-0001", RunState.RUNNING), ("calm-owl-0002", RunState.FINISHED)),
        )
    ]
    async with opened(private_home, snapshot_of=_stored_snapshot) as it:
        assert max(float(s.x[-1]) for s in it.series()) == 200
        store = StoreWriter(runs[0].db_path)
        write_steps(store, values, first=200)
        store.close()
        await until(it.pilot, lambda: max(float(s.x[-1]) for s in it.series()) == 400)


def _stored_snapshot(run: RunDir) -> RunSnapshot:
    """The snapshot as stored: a run without a supervisor would be ended otherwise."""
    with RunStore(run) as store:
        return store.snapshot()


async def test_a_small_terminal_shows_one_panel_at_a_time(home: Path) -> None:
    async with opened(home, SMALL) as it:
        for key, name in (("1", "curves"), ("3", "settings"), ("2", "runs")):
            await it.press(key)
            await it.pilot.pause()
            assert [panel.id for panel in it.screen.query("Panel") if panel.display] == [name]
        # Without a frame, the tab names the metric of the table.
        assert " 2 runs by " in str(it.screen.query_one(TabBar).render())
        assert "? help" in str(it.screen.query_one(KeyFooter).render())
        await it.press("enter")
        await reached(it.pilot, RunScreen)


@pytest.mark.parametrize("size", [BIG, SMALL])
async def test_runs_that_do_not_fit_beside_the_settings_are_counted_and_scrolled_to(
    private_home: Path, size: tuple[int, int]
) -> None:
    for number in range(9):
        run_id, settings = f"quite-a-long-name-{number}-000{number}", config(lr=0.1, seed=number)
        write_run(private_home, run_id, losses(20), configuration=settings)
    async with opened(private_home, size) as it:
        await it.press("3")
        table = it.table("settings")

        def said() -> str:
            tabs = it.screen.query_one(TabBar)
            return f"{tabs.render() if tabs.display else ''} {it.caption('settings')}"

        hidden = table.hidden[1]
        assert hidden > 0
        await until(it.pilot, lambda: f"+{hidden}" in said())
        await it.press(*["right"] * hidden)
        await until(it.pilot, lambda: table.hidden[1] == 0)
        assert table._placed[-1].column.key == "quite-a-long-name-8-0008"
        await until(it.pilot, lambda: "→" not in said())


async def test_a_damaged_run_is_named_and_the_others_are_shown(private_home: Path) -> None:
    runs = write_seeds(private_home)
    runs[0].db_path.write_bytes(b"no database" * 1000)
    async with opened(private_home) as it:
        assert len(it.comparison.runs) == 4
        await until(it.pilot, lambda: len(notices(it.pilot.app)) == 1)


async def test_a_run_can_be_compared_with_another_from_the_palette(home: Path) -> None:
    first, second, *_ = sorted(list_runs(home), key=lambda run: run.id)
    app = LtuiApp(home, run=first)
    async with app.run_test(size=BIG) as pilot:
        places = {place.title: place for place in read_places(app, first)[0]}
        places[f"Compare with run {second.id}"].open()
        screen = await reached(pilot, CompareScreen)
        await until(pilot, lambda: screen.comparison is not None)
        await pilot.press("q")
        await reached(pilot, RunScreen)
