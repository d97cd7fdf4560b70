"""A made-up run with every widget on one screen, the same at every call: for snapshots."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace
from textual.app import App, ComposeResult
from textual.containers import Horizontal

from ltui.app.presentation.run_view import RANK_METRICS
from ltui.widgets.charts.chart import Chart
from ltui.widgets.header import RunHeader
from ltui.widgets.log_view import LogView
from ltui.widgets.palette import THEMES
from ltui.widgets.run_tables import GpuTable, RankTable
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import (
    Cell,
    ChartSeries,
    ChartViewModel,
    GpuRow,
    HeaderViewModel,
    LogLine,
    RankMetric,
    RankRow,
)

STEPS = np.arange(1.0, 1205.0)
BANNER = (
    "STALLED 8 s: rank 2 waits for DataLoader worker 4711, frozen in augment.py:88; "
    "ranks 0, 1, 3 wait in all_reduce #1043.   d diagnose"
)
HEADER = HeaderViewModel(
    name="brave-owl", preset="cifar10-cnn", state="STALLED", state_sign="!", tone=Tone.BAD,
    epoch="epoch 3/30", step="step 1 204/2 930", share=0.41, eta="12 m 08 s left",
    elapsed="8 m 31 s", attempt="attempt 2", banner=BANNER,
)  # fmt: skip


def rank_metrics(rate: str, cpu: str, memory: str) -> tuple[RankMetric, ...]:
    """Return the metrics of a rank with the columns that a run screen has."""
    tones = (Tone.PLAIN, Tone.DIM, Tone.DIM)
    return tuple(
        RankMetric(column=metric.column, cell=Cell(text=text, tone=tone))
        for metric, text, tone in zip(RANK_METRICS, (rate, cpu, memory), tones, strict=True)
    )


RANK = RankRow(
    rank="r0", pid="48120", device="cuda:0", phase="backward", step="1 204", age="12 ms",
    strip=(0.05, 0.06, 0.05, 0.07, 0.05, 0.05), state=Cell(text="ok"),
    metrics=rank_metrics("7.84 k img/s", "98 %", "2.10 GiB"),
)  # fmt: skip
STALLED = replace(
    RANK, rank="r2", phase="fetch data", step="1 203", age="8.2 s",
    strip=(0.05, 0.06, 0.05, 0.07, 0.05, 0.9), state=Cell(text="STALLED", tone=Tone.BAD),
    note="worker 4711 in augment.py:88",
)  # fmt: skip
RANKS = (
    RANK,
    replace(RANK, rank="r1", device="cuda:1"),
    replace(STALLED, device="cuda:2"),
    replace(RANK, rank="r3", device="cuda:3", state=Cell(text="waiting", tone=Tone.WARN)),
)
GPUS = tuple(
    GpuRow(
        index=str(number), name="NVIDIA H200", ranks=f"r{number}", utilisation=share,
        utilisation_text=f"{share:.0%}".replace("%", " %"), memory=0.43,
        memory_text="61.2 / 140 GiB", power_text="612 / 700 W", temperature=Cell(text="64 °C"),
        clock_text="1 980 MHz", strip=(0.9, 0.94, 0.97, share),
    )
    for number, share in enumerate((0.98, 0.97, 0.03, 1.0))
)  # fmt: skip
LOG = (
    LogLine(rank=0, text="Epoch 3: validation loss 0.634"),
    LogLine(rank=1, text="UserWarning: [bold]markup stays text[/bold]", tone=Tone.WARN, count=12),
    LogLine(rank=2, text="RuntimeError: DataLoader worker 4711 is frozen", tone=Tone.BAD),
    LogLine(rank=None, text="elastic: waiting for rank 2"),
)


def loss() -> ChartViewModel:
    random = np.random.default_rng(7)
    smooth = 2.3 * np.exp(-STEPS / 300) + 0.25
    raw = smooth + random.normal(0, 0.1, STEPS.size)
    raw[500:600] = np.nan
    epochs = np.arange(98.0, 1205.0, 98.0)
    return ChartViewModel(
        title="loss",
        series=(
            ChartSeries(name="raw", x=STEPS, y=raw, dim=True),
            ChartSeries(name="train", x=STEPS, y=np.where(np.isnan(raw), np.nan, smooth)),
            ChartSeries(name="validation", x=epochs, y=2.3 * np.exp(-epochs / 300) + 0.4, colour=1),
        ),
    )


def throughput() -> ChartViewModel:
    rate = 31_000 + 900 * np.sin(STEPS / 40)
    return ChartViewModel(
        title="throughput",
        x_label="time",
        x_time=True,
        series=(
            ChartSeries(name="img/s", x=STEPS, y=rate, low=rate - 700, high=rate + 500, colour=2),
        ),
    )


class Board(App[None]):
    CSS = """
    #charts { height: 1fr; }
    GpuTable, RankTable { height: 5; margin-top: 1; }
    LogView { height: 5; margin-top: 1; }
    """

    def __init__(self, theme: str) -> None:
        super().__init__()
        for known in THEMES:
            self.register_theme(known)
        self.theme = theme

    def compose(self) -> ComposeResult:
        header = RunHeader()
        header.view_model = HEADER
        yield header
        with Horizontal(id="charts"):
            yield Chart(loss())
            yield Chart(throughput())
        yield GpuTable()
        yield RankTable()
        yield LogView()

    def on_mount(self) -> None:
        self.query_one(LogView).lines.extend(LOG)
        self.query_one(GpuTable).set_rows(GPUS)
        self.query_one(RankTable).set_rows(RANKS)
        self.query_one(RankTable).focus()
        self.query(Chart).first(Chart).crosshair = 300.0
