"""The charts of one GPU over the last minutes. Pure."""

from __future__ import annotations

import numpy as np

from ltui.app.live.gpu_history import GpuSeries
from ltui.widgets.view_models import ChartSeries, ChartViewModel

GIB = float(1 << 30)
_LINES = {
    "activity": (
        ("util", "utilisation", 0),
        ("SM", "sm", 1),
        ("tensor cores", "tensor", 2),
        ("DRAM", "dram", 3),
    ),
    "power": (("power", "power_w", 1),),
    "temperature": (("temperature", "temperature_c", 5),),
    "memory": (("memory", "memory_bytes", 4),),
}
"""Chart to its lines: name, field of ``GpuSample``, number of the colour."""
_UNITS = {
    "activity": ("% of time", 100.0),
    "power": ("W", 1.0),
    "temperature": ("°C", 1.0),
    "memory": ("GiB", 1 / GIB),
}
"""Chart to its unit, and the factor by which a field of ``GpuSample`` is multiplied."""
CHART_NAMES = tuple(_LINES)
"""Names of the charts, in their order on the screen."""
_NO_DATA = "not available on this GPU, or not sampled yet"


def gpu_charts(history: GpuSeries) -> dict[str, ChartViewModel]:
    """Return the charts by name: activity, power, temperature and memory.

    They show the past; the present readings are in the table or the list beside them.
    """
    times = np.array([sample.at for sample in history.samples], dtype=np.float64)
    x = times - times[0] if len(times) else times
    charts = {}
    for name, lines in _LINES.items():
        unit, factor = _UNITS[name]
        series = []
        for line, field, colour in lines:
            values = [getattr(sample, field) for sample in history.samples]
            y = factor * np.array(values, dtype=np.float64)
            if np.isfinite(y).any():
                series.append(ChartSeries(name=line, x=x, y=y, colour=colour))
        charts[name] = ChartViewModel(
            title=f"{name}, {unit}",
            series=tuple(series),
            x_label="time",
            x_time=True,
            note=None if series else _NO_DATA,
            is_rate=name != "temperature",
            shows_values=False,
        )
    return charts
