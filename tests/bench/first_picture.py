"""``python -m tests.bench.first_picture RUN``: the seconds until the charts of a run are drawn.

And the memory in MB."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import psutil

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.run_poller import RunPoller
from ltui.app.presentation.metric_charts import ChartSettings, metric_charts, second_chart
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.plot import plot
from tests.bench.terminal_process import COLUMNS, LINES

ROUNDS = 5


def first_picture(run: RunDir) -> float:
    """Return the seconds in which both charts of the run screen are read and drawn."""
    began = time.perf_counter()
    poller = RunPoller(run, LatestCurveRequest())
    frame = poller.poll(time.time(), time.monotonic_ns())
    charts = [*metric_charts(frame, ChartSettings()), second_chart(frame, ChartSettings())]
    for chart in charts:
        assert chart.series, chart.note
        plot(chart, ChartOptions(), COLUMNS // 2, LINES // 2)
    taken = time.perf_counter() - began
    poller.close()
    return taken


if __name__ == "__main__":
    run_dir = RunDir(Path(sys.argv[1]))
    taken = [first_picture(run_dir) for _ in range(ROUNDS)]
    print(statistics.median(taken), psutil.Process().memory_info().rss / 1e6)
