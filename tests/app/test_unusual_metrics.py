"""The screen of all metrics with NaN, infinities, late metrics and control characters in names."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from ltui.app.live.curve_arithmetic import CurveRequest, LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.live.run_poller import RunPoller
from ltui.app.presentation.metric_charts import ChartSettings, charts_of_names
from ltui.app.screens.metrics import MetricsScreen
from ltui.app.settings import read_preferences
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.widgets.charts.chart import Chart
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.plot import Plot, plot
from tests.app.one_run import OneRunAt, Script, one_run, reached, until
from tests.store.histories import begin, run_dir, snapshot

STEPS = 1000
LATE_FROM = 900
EVIL = "loss\x1b[31m\x1b]0;title\x07\n[bold]/../x"
"""A name with a colour, a window title, a line break, markup and a path."""
CLEAN = "loss [bold]/../x"
VALUES: dict[str, Callable[[int], float | None]] = {
    "gaps": lambda step: {3: math.nan, 4: math.inf, 5: -math.inf}.get(step % 10, step / STEPS),
    "never": lambda _: math.nan,
    "infinite": lambda _: math.inf,
    "late": lambda step: 1.0 if step >= LATE_FROM else None,
    EVIL: lambda step: float(step),
}


@pytest.fixture
def frame(tmp_path: Path) -> Iterator[Frame]:
    run = run_dir(tmp_path)
    writer = StoreWriter(run.db_path)
    begin(writer)
    batch = Batch()
    batch.samples += [
        (0, step, name, step, 0, 1000.0 + step, value)
        for step in range(1, STEPS + 1)
        for name, value_at in VALUES.items()
        if (value := value_at(step)) is not None
    ]
    writer.commit(1, batch)
    writer.write_snapshot(snapshot(taken_at=1.0, global_step=STEPS, preset="quickstart"))
    writer.close()
    requests = LatestCurveRequest()
    requests.request = CurveRequest(names=frozenset(VALUES))
    poller = RunPoller(run, requests)
    poller.poll(time.time(), time.monotonic_ns())
    yield poller.poll(time.time(), time.monotonic_ns())
    poller.close()


def drawn(frame: Frame, name: str, *, log_y: bool = False) -> Plot:
    (chart,) = charts_of_names(frame, ChartSettings(), [name])
    return plot(chart, ChartOptions(log_y=log_y), 60, 12)


def dots(plotted: Plot) -> list[int]:
    """Return the columns with dots of a curve."""
    lines = plotted.canvas.text().splitlines()
    return sorted(x for line in lines for x, letter in enumerate(line) if "⠁" <= letter <= "⣿")


@pytest.mark.parametrize("log_y", [False, True])
def test_nan_and_infinities_are_gaps_and_never_on_the_axis(frame: Frame, log_y: bool) -> None:
    plotted = drawn(frame, "gaps", log_y=log_y)
    assert plotted.y is not None
    assert math.isfinite(plotted.y.low)
    assert math.isfinite(plotted.y.high)
    low, high = (0.0, 1.0) if not log_y else (-3.0, 0.0)
    assert (plotted.y.low, plotted.y.high) == (low, high)
    cells_in_column = Counter(dots(plotted))
    assert len(cells_in_column) > 40
    assert median(cells_in_column.values()) <= 2, "an infinity is no line from bottom to top"
    # The smoothed curve goes on after each gap, because it skips what is not finite.
    (chart,) = charts_of_names(frame, ChartSettings(), ["gaps"])
    assert math.isfinite(chart.series[-1].y[-1])


@pytest.mark.parametrize(("name", "newest"), [("never", "n/a"), ("infinite", "n/a")])
def test_a_metric_without_a_finite_value_says_so(frame: Frame, name: str, newest: str) -> None:
    plotted = drawn(frame, name)
    assert not dots(plotted)
    assert "no values yet" in plotted.canvas.text()
    assert newest in plotted.canvas.line(0)


def test_a_late_metric_has_the_axis_of_the_run_and_is_not_extrapolated(frame: Frame) -> None:
    plotted = drawn(frame, "late")
    assert plotted.x is not None
    assert plotted.x.low <= 1
    assert plotted.x.high >= STEPS
    assert min(dots(plotted)) > 0.85 * 60


async def test_a_name_with_control_characters_is_shown_plain_and_kept_exact(
    frame: Frame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with one_run(OneRunAt(tmp_path, Script(frame))) as (pilot, _, _):
        await pilot.press("M")
        screen = await reached(pilot, MetricsScreen)
        await until(pilot, lambda: EVIL in screen.charts.visible_names())
        screen.charts.go_to(EVIL)
        await until(pilot, lambda: screen.charts.focused_name() == EVIL)
        chart = screen.focused
        assert isinstance(chart, Chart)
        assert chart.view_model is not None
        assert chart.view_model.title == CLEAN
        assert str(chart.border_title).replace("\\", "") == CLEAN
        assert dots(chart._current_plot())
        await pilot.press("asterisk", "w")
        await until(pilot, lambda: list(tmp_path.glob("*.svg")))
    (saved,) = tmp_path.glob("*.svg")
    assert all(letter.isalnum() or letter in "-_." for letter in saved.name)
    stored = read_preferences(tmp_path)["all_metrics"]["quickstart"]
    assert stored["favourites"] == [EVIL]
