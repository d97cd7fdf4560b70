"""The charts of one GPU over the last minutes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ltui.app.live.gpu_history import GpuSample, GpuSeries
from ltui.app.presentation.snapshot_text import percent_of_time
from ltui.training.state.run_snapshot import GpuSnapshot
from ltui.widgets import formats
from ltui.widgets.view_models import ChartSeries, ChartViewModel

CHART_NAMES = ("activity", "power", "temperature", "memory")
"""Names of the charts, in their order on the screen."""
GIB = float(1 << 30)
_NO_DATA = "not available on this GPU, or not sampled yet"


def gpu_charts(gpu: GpuSnapshot, history: GpuSeries) -> dict[str, ChartViewModel]:
    """Return the charts by name: activity, power, temperature and memory."""
    samples = history.samples
    times = np.array([s.at for s in samples], dtype=np.float64)
    x = times - times[0] if len(times) else times

    def line(name: str, values: Sequence[float], colour: int) -> ChartSeries | None:
        y = np.array(values, dtype=np.float64)
        return ChartSeries(name=name, x=x, y=y, colour=colour) if np.isfinite(y).any() else None

    def chart(title: str, now: str, lines: Sequence[ChartSeries | None]) -> ChartViewModel:
        shown = tuple(series for series in lines if series is not None)
        return ChartViewModel(
            title=title,
            subtitle=now,
            series=shown,
            x_label="time",
            x_time=True,
            note=None if shown else _NO_DATA,
        )

    return {
        "activity": chart(
            "activity, % of time",
            percent_of_time(gpu.utilisation_percent),
            [
                line("utilisation", [100 * s.utilisation for s in samples], 0),
                line("SM", [100 * s.sm for s in samples], 1),
                line("tensor cores", [100 * s.tensor for s in samples], 2),
                line("DRAM", [100 * s.dram for s in samples], 3),
            ],
        ),
        "power": chart(
            "power, W",
            formats.power(gpu.power_w, gpu.power_limit_w),
            [line("power", _column(samples, "power_w"), 1)],
        ),
        "temperature": chart(
            "temperature, °C",
            formats.temperature(gpu.temperature_c),
            [line("temperature", _column(samples, "temperature_c"), 5)],
        ),
        "memory": chart(
            "memory, GiB",
            formats.size_of(gpu.memory_used_bytes, gpu.memory_total_bytes),
            [line("memory", (np.array(_column(samples, "memory_bytes")) / GIB).tolist(), 4)],
        ),
    }


def _column(samples: Sequence[GpuSample], name: str) -> list[float]:
    return [float(getattr(sample, name)) for sample in samples]
