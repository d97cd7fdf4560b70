"""``python -m tests.bench.first_picture RUN STEPS``: the seconds until the charts are drawn.

And those until the curve of the last steps is read, and the memory in MB of the first.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import psutil

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.run_poller import RunPoller
from ltui.app.presentation.metric_charts import ChartSettings, metric_charts, second_chart
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.plot import plot
from tests.bench.terminal_process import COLUMNS, LINES

ROUNDS = 5
LAST_STEPS = 20_000


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


def last_steps(run: RunDir, steps: int) -> float:
    """Return the seconds in which the curve of the last of so many steps is read."""
    began = time.perf_counter()
    with RunStore(run) as store:
        assert len(store.curve("train/loss", first_step=steps - LAST_STEPS)) > 500
    return time.perf_counter() - began


if __name__ == "__main__":
    run_dir = RunDir(Path(sys.argv[1]))
    taken = [first_picture(run_dir) for _ in range(ROUNDS)]
    rss_mb = psutil.Process().memory_info().rss / 1e6
    near = [last_steps(run_dir, int(sys.argv[2])) for _ in range(ROUNDS)]
    print(statistics.median(taken), statistics.median(near), rss_mb)
