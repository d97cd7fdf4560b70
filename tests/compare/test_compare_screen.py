"""The comparison on the screen: curves, tables, groups, and runs that go on meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

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
from ltui.widgets.view_models import ChartSeries
from tests.compare.stored_runs import (
    BEGAN,
    STEP_S,
    config,
    losses,
    write_run,
    write_seeds,
    write_steps,
)

BIG, SMALL = (160, 50), (80, 24)


async def until(pilot: Pilot[None], done: Callable[[], bool]) -> None:
    for _ in range(400):
        if done():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never happened")


class Opened:
    """An app whose first screen compares all runs of a home directory."""

    def __init__(self, home: Path) -> None:
        self.run_dirs = sorted(list_runs(home), key=lambda run: run.id)
        self.app = LtuiApp(home, first=lambda: CompareScreen(self.run_dirs))

    @property
    def screen(self) -> CompareScreen:
        screen = next(s for s in self.app.screen_stack if isinstance(s, CompareScreen))
        assert isinstance(screen, CompareScreen)
        return screen

    async def ready(self, pilot: Pilot[None]) -> Comparison:
        await until(pilot, lambda: self.screen.comparison is not None)
        assert self.screen.comparison is not None
        return self.screen.comparison

    def series(self, number: int = 0) -> list[ChartSeries]:
        """The clear curves of a chart."""
        view_model = list(self.screen.query(Chart))[number].view_model
        assert view_model is not None
        return [series for series in view_model.series if not series.dim]

    def table(self, name: str = "runs") -> ComparisonTable:
        return self.screen.query_one(f"#{name}-table", ComparisonTable)

    def column(self, key: str) -> list[str]:
        return ["".join(c.text for c in row.cells[key]).strip() for row in self.table().rows]


@pytest.fixture
def opened(private_home: Path) -> Opened:
    write_seeds(private_home)
    return Opened(private_home)


async def test_every_run_is_a_curve_with_its_sign_beside_it(opened: Opened) -> None:
    async with opened.app.run_test(size=BIG) as pilot:
        comparison = await opened.ready(pilot)
        await pilot.press("n")  # from val/acc to train/loss
        assert {s.name: s.colour for s in opened.series()} == {
            f"{comparison.names[run_id]} smoothed": colour
            for run_id, colour in comparison.colours.items()
        }
        # The reference is drawn over the others.
        assert opened.series()[-1].name == "brave-owl smoothed"
        signs = [sign_of(colour) for colour in comparison.colours.values()]
        assert sorted(opened.column("sign")) == sorted(signs)
        settings = opened.table("settings").rows
        assert [row.key for row in settings][:2] == ["seed_everything", "model.lr"]
        lr = settings[1].cells
        assert "".join(cell.text for cell in lr["setting"]).startswith("≠ ")
        assert lr["eager-owl-0003"][0].text == "0.3"


async def test_keys_hide_pin_sort_and_align(opened: Opened) -> None:
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        await pilot.press("n", "down", "space")
        assert "calm-owl smoothed" not in [series.name for series in opened.series()]
        assert opened.column("sign")[1] == "·"
        await pilot.press("space", "p")
        assert opened.column("run")[1] == "calm-owl ◂ reference"
        assert opened.series()[-1].name == "calm-owl smoothed"
        assert opened.column("delta")[1] == ""
        await pilot.press("s", "s")
        best = [float(text) for text in opened.column("best")]
        assert best == sorted(best)
        steps = opened.series()[0].x
        await pilot.press("x", "x")
        assert opened.screen.comparison is not None
        assert opened.screen.comparison.axis == "time"
        assert opened.series()[0].x[-1] < steps[-1]
        await pilot.press("x")
        assert opened.screen.comparison.axis == "step"
        await pilot.press("n")
        chart = opened.screen.query(Chart).first()
        assert chart.view_model is not None
        assert chart.view_model.title == "val/acc"


async def test_groups_are_one_curve_and_members_come_on_demand(opened: Opened) -> None:
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        await pilot.press("G")
        assert [series.name for series in opened.series()] == ["lr=0.1 (3)", "lr=0.3 (2)"]
        caption = str(opened.screen.query_one("#curves").border_subtitle)
        assert "mean, min to max; faint: fewer runs" in caption
        first = opened.series()[0]
        assert first.low is not None
        assert first.high is not None
        assert (first.low <= first.high).all()
        assert opened.column("run") == ["▸ lr=0.1 (3 runs)", "▸ lr=0.3 (2 runs)"]
        assert opened.column("setting seed_everything") == ["3 values", "2 values"]
        await pilot.press("enter")
        assert opened.column("run")[1:4] == ["brave-owl ◂ reference", "calm-owl", "deep-owl"]
        ranges = first.high - first.low
        await pilot.press("B", "B")
        again = opened.series()[0]
        assert again.low is not None
        assert again.high is not None
        assert not np.allclose(again.high - again.low, ranges)


async def test_keys_change_all_charts_and_the_axis_suits_the_shown_runs(private_home: Path) -> None:
    fall = [10.0 ** (-4 * n / 300) for n in range(300)]
    metrics = {"val/loss": dict(enumerate(fall, start=1))}
    for name, values in (("brave", fall), ("calm", [1.0] * 300)):
        configuration = config(lr=0.1, seed=len(name))
        write_run(
            private_home, f"{name}-owl-0001", values, configuration=configuration, metrics=metrics
        )
    opened = Opened(private_home)
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        charts = list(opened.screen.query(Chart))
        assert [chart.is_log for chart in charts] == [True, True]
        await pilot.press("1", "y", "o")
        assert [(chart.is_log, chart.outliers) for chart in charts] == [(False, True)] * 2
        await pilot.press("left")
        assert charts[0].crosshair == charts[1].crosshair != None  # noqa: E711
        # Without the run that falls, the chart of the training loss has a linear axis.
        await pilot.press("escape", "2", "home", "space")
        views = {c.view_model.title: c.view_model.log_y for c in charts if c.view_model}
        assert views == {"train/loss": False, "val/loss": True}


async def test_groups_and_members_are_sorted_best_first(opened: Opened) -> None:
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        await pilot.press("G", "enter", "s", "s")
        best = [float(text) for text in opened.column("best")]
        # A higher accuracy is better, so the best one comes first.
        assert opened.column("run")[0].startswith("▸ lr=0.3")
        assert best[:2] == sorted(best[:2], reverse=True)
        assert best[2:] == sorted(best[2:], reverse=True)
        await pilot.press("S")
        assert [float(text) for text in opened.column("best")][1:4] == best[:1:-1]
        titles = [column.title for column in opened.table().columns_of(())]
        assert "best ▴" in titles
        (title,) = [one for one in opened.table()._placed if one.column.key == "final"]
        await pilot.click(opened.table(), offset=(title.x + 4, 0))
        await until(pilot, lambda: opened.screen.settings.order == "final")
        assert not opened.screen.settings.reversed
        await pilot.click(opened.table(), offset=(title.x + 4, 0))
        await until(pilot, lambda: opened.screen.settings.reversed)


async def test_parameters_show_the_run_under_the_cursor_of_either_table(opened: Opened) -> None:
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        await pilot.press("down", "4")
        shown = [panel.id for panel in opened.screen.query("Panel") if panel.display]
        assert shown == ["parameters", "runs", "settings"]
        assert opened.table("parameters").cursor_key == "calm-owl-0001"
        chart = opened.screen.query_one(ParallelChart)
        assert opened.screen.comparison is not None
        sign = sign_of(opened.screen.comparison.colours["calm-owl-0001"])
        await pilot.pause()
        # On the axes of lr, seed and loss, and beside the last one.
        assert chart.plain_text().count(sign) == 4
        assert "final" not in chart.plain_text()
        await pilot.press("v", "down", "down")
        assert "final" in chart.plain_text()
        assert opened.table("runs").cursor_key == "eager-owl-0003"
        await pilot.press("s", "s", "s")
        assert opened.screen.settings.order == "setting seed_everything"
        rows = opened.table("parameters").rows
        seeds = ["".join(c.text for c in row.cells["setting seed_everything"]) for row in rows]
        assert seeds == sorted(seeds)
        await pilot.click(ParallelChart, offset=(1, chart.size.height - 1))
        clicked = opened.table("parameters").cursor_key
        assert clicked is not None
        # The foot of the first axis is the lower learning rate.
        assert opened.screen.comparison.by_id[clicked].settings["model.lr"] == "0.1"
        await pilot.press("G", "home")
        assert "3 values" in [
            "".join(cell.text for cell in row.cells["setting seed_everything"])
            for row in opened.table("parameters").rows
        ]
        await pilot.press("1")
        assert not opened.screen.query_one("#parameters").display


async def test_charts_show_the_marks_of_the_run_under_the_cursor(private_home: Path) -> None:
    runs = write_seeds(private_home)
    store = StoreWriter(runs[1].db_path)
    # A minute after the end of the first attempt, and 500 steps before it.
    began = BEGAN + 1400 * STEP_S + 60
    store.begin_attempt(
        2, started_at=began, boot_id="b", resumed_path="a.ckpt", resumed_step=900, changes=("lr",)
    )
    store.close()
    opened = Opened(private_home)
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)

        def marks() -> list[tuple[float, str, str]]:
            view_model = opened.screen.query(Chart).first().view_model
            assert view_model is not None
            return [(mark.at, mark.sign, mark.text) for mark in view_model.marks]

        assert marks() == []
        await pilot.press("down")
        await until(pilot, lambda: len(marks()) == 2)
        assert marks() == [
            (900, "»", "attempt 2 from step 900"),
            (900, "~", "changed lr"),
        ]
        assert "» attempt  ~ change of calm-owl" in str(
            opened.screen.query_one("#curves").border_subtitle
        )
        await pilot.press("x", "x")
        # Training time excludes the minute between the attempts.
        assert [at for at, _, _ in marks()] == pytest.approx([1400 * STEP_S] * 2)
        await pilot.press("1", "full_stop")
        assert opened.screen.query(Chart).first().crosshair == pytest.approx(1400 * STEP_S)


async def test_a_read_only_dashboard_stores_no_colours(opened: Opened) -> None:
    opened.app.readonly = True
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        assert not any(run.labels_path.exists() for run in opened.run_dirs)


async def test_parameters_and_charts_are_copied_and_saved(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copied: list[str] = []
    monkeypatch.setattr(opened.app, "copy_to_clipboard", copied.append)
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        await pilot.press("n", "w", "Y", "4", "w", "Y")
        await until(pilot, lambda: len(copied) == 2)
    assert "train/loss" in copied[0]
    assert "seed_everything" in copied[1]
    files = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert files == ["ltui-parameters-best-train-loss.svg", "ltui-train-loss.svg"]
    assert "brave-owl" in (tmp_path / files[0]).read_text()


async def test_the_key_that_saves_a_chart_does_no_harm_before_there_is_one(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        with monkeypatch.context() as patch:
            patch.setattr(MetricGrid, "charts", [])
            opened.screen.action_export("svg")
        shown = opened.app._notifications
        await until(pilot, lambda: [n.message for n in shown] == ["No chart is shown."])
    assert not list(tmp_path.glob("*.svg"))


async def test_other_metrics_are_chosen_from_the_list(opened: Opened) -> None:
    async with opened.app.run_test(size=BIG) as pilot:
        comparison = await opened.ready(pilot)
        assert comparison.metrics == ("val/acc", "train/loss")
        await pilot.press("m")
        await until(pilot, lambda: isinstance(opened.app.screen, MetricChooser))
        names = list(comparison.runs[0].metric_names)
        # The list has the names in order; the loss is deselected and the filter finds the other.
        await pilot.press(*["down"] * sorted(names).index("train/loss"), "space", "enter")
        await until(
            pilot,
            lambda: (
                opened.screen.comparison is not None
                and opened.screen.comparison.metrics == ("val/acc",)
            ),
        )
        view_model = opened.screen.query(Chart).first().view_model
        assert view_model is not None
        assert view_model.title == "val/acc"
        await pilot.press("m")
        await until(pilot, lambda: isinstance(opened.app.screen, MetricChooser))
        await pilot.press("d")
        await until(
            pilot,
            lambda: (
                opened.screen.comparison is not None and len(opened.screen.comparison.metrics) == 2
            ),
        )


async def test_a_run_without_metrics_is_compared_with_the_others(private_home: Path) -> None:
    write_seeds(private_home)
    write_run(private_home, "empty-owl-0009", [], configuration=config(lr=0.7, seed=1))
    opened = Opened(private_home)
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        assert len(opened.series()) == 5
        place = opened.column("run").index("empty-owl")
        assert opened.column("best")[place] == "n/a"
        await pilot.press("4", "end", "x", "x")
        assert "n/a" in opened.screen.query_one(ParallelChart).plain_text()


async def test_nan_and_infinite_values_are_gaps_on_every_panel(private_home: Path) -> None:
    runs = write_seeds(private_home, steps=600)
    odd = {100: math.nan, 200: math.inf, 300: 0.4, 400: -math.inf, 500: math.nan}
    for name, values in (("odd", odd), ("void", dict.fromkeys(odd, math.nan))):
        write_run(
            private_home,
            f"{name}-owl-0009",
            losses(500),
            # The same settings as those of the first group, with another seed.
            configuration=config(lr=0.1, seed=len(name)),
            metrics={"val/acc": values},
        )
    assert len(runs) == 5
    opened = Opened(private_home)
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        await pilot.press("minus", "minus", "minus", "minus")
        by_name = {series.name: series for series in opened.series()}
        assert np.isfinite(by_name["odd-owl"].y).tolist() == [False, False, True, False, False]
        assert not np.isfinite(by_name["void-owl"].y).any()
        best = dict(zip(opened.column("run"), opened.column("best"), strict=True))
        assert (best["odd-owl"], best["void-owl"]) == ("0.4000", "n/a")
        for key in ("x", "x", "x", "4", "v", "v", "G", "B", "B", "B", "s", "s", "s"):
            await pilot.press(key)
        group = next(series for series in opened.series() if series.name == "lr=0.1 (5)")
        assert np.isfinite(group.y).all()
        assert "n/a" in opened.screen.query_one(ParallelChart).plain_text()


async def test_a_live_run_goes_on_growing(private_home: Path) -> None:
    values = losses(400)
    for name, state in (("brave-owl-0001", RunState.RUNNING), ("calm-owl-0002", RunState.FINISHED)):
        write_run(
            private_home,
            name,
            values[:200],
            configuration=config(lr=0.1, seed=len(name)),
            state=state,
        )
    opened = Opened(private_home)
    opened.app._first = lambda: CompareScreen(opened.run_dirs, snapshot_of=_stored_snapshot)
    async with opened.app.run_test(size=BIG) as pilot:
        await opened.ready(pilot)
        assert max(float(s.x[-1]) for s in opened.series()) == 200
        store = StoreWriter(RunDir(private_home / "runs" / "brave-owl-0001").db_path)
        write_steps(store, values, first=200)
        store.close()
        await until(pilot, lambda: max(float(s.x[-1]) for s in opened.series()) == 400)


def _stored_snapshot(run: RunDir) -> RunSnapshot:
    """The snapshot as stored: a run without a supervisor would be ended otherwise."""
    with RunStore(run) as store:
        return store.snapshot()


async def test_a_small_terminal_shows_one_panel_at_a_time(opened: Opened) -> None:
    async with opened.app.run_test(size=SMALL) as pilot:
        await opened.ready(pilot)
        for key, name in (("1", "curves"), ("3", "settings"), ("2", "runs")):
            await pilot.press(key)
            await pilot.pause()
            shown = [panel.id for panel in opened.screen.query("Panel") if panel.display]
            assert shown == [name]
        # Without a frame, the tab names the metric of the table.
        assert " 2 runs by " in str(opened.screen.query_one(TabBar).render())
        assert "? help" in str(opened.screen.query_one(KeyFooter).render())
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(opened.app.screen, RunScreen))


@pytest.mark.parametrize("size", [BIG, SMALL])
async def test_runs_that_do_not_fit_beside_the_settings_are_counted_and_scrolled_to(
    private_home: Path, size: tuple[int, int]
) -> None:
    for number in range(9):
        write_run(
            private_home,
            f"quite-a-long-name-{number}-000{number}",
            losses(20),
            configuration=config(lr=0.1 * number, seed=number),
        )
    opened = Opened(private_home)
    async with opened.app.run_test(size=size) as pilot:
        await opened.ready(pilot)
        await pilot.press("3")
        table, panel = opened.table("settings"), opened.screen.query_one("#settings")

        def said() -> str:
            tabs = opened.screen.query_one(TabBar)
            return f"{tabs.render() if tabs.display else ''} {panel.border_subtitle}"

        hidden = table.hidden[1]
        assert hidden > 0
        await until(pilot, lambda: f"+{hidden}" in said())
        await pilot.press(*["right"] * hidden)
        await until(pilot, lambda: table.hidden[1] == 0)
        assert table._placed[-1].column.key == "quite-a-long-name-8-0008"
        await until(pilot, lambda: "→" not in said())


async def test_a_damaged_run_is_named_and_the_others_are_shown(private_home: Path) -> None:
    runs = write_seeds(private_home)
    runs[0].db_path.write_bytes(b"no database" * 1000)
    opened = Opened(private_home)
    async with opened.app.run_test(size=BIG) as pilot:
        comparison = await opened.ready(pilot)
        assert len(comparison.runs) == 4
        await until(pilot, lambda: len(opened.app._notifications) == 1)


async def test_a_run_can_be_compared_with_another_from_the_palette(opened: Opened) -> None:
    app = LtuiApp(opened.app.home, run=opened.run_dirs[0])
    async with app.run_test(size=BIG) as pilot:
        places = {place.title: place for place in read_places(app, opened.run_dirs[0])[0]}
        places[f"Compare with run {opened.run_dirs[1].id}"].open()
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        screen = app.screen
        assert isinstance(screen, CompareScreen)
        await until(pilot, lambda: screen.comparison is not None)
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
