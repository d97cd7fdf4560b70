"""The charts of one GPU over the last minutes. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ltui.app.live.gpu_history import GpuSeries
from ltui.widgets.view_models import ChartSeries, ChartViewModel

GIB = float(1 << 30)


class _Line(NamedTuple):
    name: str
    reading: str
    """One of ``GPU_READINGS``."""
    colour: int
    factor: float = 1.0
    """The reading times this is in the unit of the chart."""


_LINES = {
    "activity": (
        _Line("util", "utilisation_percent", 0),
        _Line("SM", "sm_activity", 1, 100.0),
        _Line("tensor cores", "tensor_activity", 2, 100.0),
        _Line("DRAM", "dram_activity", 3, 100.0),
    ),
    "power": (_Line("power", "power_w", 1),),
    "temperature": (_Line("temperature", "temperature_c", 5),),
    "memory": (_Line("memory", "memory_used_bytes", 4, 1 / GIB),),
}
_UNITS = {"activity": "% of time", "power": "W", "temperature": "°C", "memory": "GiB"}
CHART_NAMES = tuple(_LINES)
"""Names of the charts, in their order on the screen."""
_NO_DATA = "not available on this GPU, or not sampled yet"


def gpu_charts(history: GpuSeries) -> dict[str, ChartViewModel]:
    """Return the charts by name: activity, power, temperature and memory.

    They show the past; the present readings are in the table or the list beside them.
    """
    times = np.array(history.values("t"), dtype=np.float64)
    x = times - times[0] if len(times) else times
    charts = {}
    for name, lines in _LINES.items():
        series = []
        for line in lines:
            y = line.factor * np.array(history.values(line.reading), dtype=np.float64)
            if np.isfinite(y).any():
                series.append(ChartSeries(name=line.name, x=x, y=y, colour=line.colour))
        charts[name] = ChartViewModel(
            title=f"{name}, {_UNITS[name]}",
            series=tuple(series),
            x_label="time",
            x_time=True,
            note=None if series else _NO_DATA,
            is_rate=name != "temperature",
            shows_values=False,
        )
    return charts
