"""One repaint of a chart: new data for four series on 160x50 cells, every line drawn."""

from __future__ import annotations

import asyncio
import statistics
import time

import numpy as np
from textual.app import App, ComposeResult

from ltui.widgets.charts.chart import Chart
from ltui.widgets.view_models import ChartSeries, ChartViewModel
from tests.bench.row import Row, row

WIDTH, HEIGHT, SERIES = 160, 50, 4
LENGTHS = (1_000, 100_000, 1_000_000)
ROUNDS = 9
BOUND_MS = 10.0


class _OneChart(App[None]):
    def compose(self) -> ComposeResult:
        yield Chart()


def measure() -> list[Row]:
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    app = _OneChart()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        await pilot.pause()
        chart = app.query_one(Chart)
        return [_row(chart, points) for points in LENGTHS]


def _row(chart: Chart, points: int) -> Row:
    taken = [_repaint(chart, _shape(points, seed)) for seed in range(ROUNDS)]
    what = f"chart repaint, {SERIES} series of {points:,} points, {WIDTH}x{HEIGHT}, median"
    return row(what, statistics.median(taken), "ms", BOUND_MS)


def _shape(points: int, seed: int) -> ChartViewModel:
    random = np.random.default_rng(seed)
    x = np.arange(points, dtype=np.float64)
    curve = np.exp(-x / points * 4)
    series = tuple(
        ChartSeries(name=f"rank {n}", x=x, y=curve + random.normal(0, 0.05, points), colour=n)
        for n in range(SERIES)
    )
    return ChartViewModel(title="loss", series=series)


def _repaint(chart: Chart, view_model: ChartViewModel) -> float:
    began = time.perf_counter()
    chart.view_model = view_model
    chart.render_lines(chart.size.region)
    return (time.perf_counter() - began) * 1e3
