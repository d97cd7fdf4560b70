"""GPU readings of the last minutes, and the averages that strips are drawn from. No clock, no
files."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.state.gpu_values import GPU_READINGS
from ltui.training.state.run_snapshot import GpuSnapshot

if TYPE_CHECKING:
    from ltui.training.store.curve_reader import FloatArray

HISTORY_S = 300.0
"""Seconds of readings that are kept."""
MAX_SAMPLES = 360
"""Maximum number of readings that are kept per GPU."""
STRIP_S, STRIP_POINTS = 10.0, 12
"""Seconds of a window of the strip, and the number of its windows."""
HEAT_S, HEAT_POINTS = 3.0, 100
"""Seconds of a window of the heat strip, and the number of its windows."""
MAX_STRIPS = 64
"""Maximum number of GPUs with strips: each costs about 0.3 ms per second."""
NAN = math.nan
_COLUMNS = ("t", *GPU_READINGS)
Row = tuple[float, ...]
"""The unix time of a reading and its ``GPU_READINGS``; NaN if the driver gave no value."""


class GpuSeries(Struct, frozen=True):
    """Readings of the last minutes of one GPU, oldest first."""

    rows: tuple[Row, ...] = ()
    strip: tuple[float, ...] = ()
    """Mean utilisation in windows of ``STRIP_S`` seconds."""
    heat: tuple[float, ...] = ()
    """Mean utilisation in windows of ``HEAT_S`` seconds."""

    def values(self, name: str) -> list[float]:
        """Return the values of one of ``GPU_READINGS``, or the times in unix seconds (``t``)."""
        column = _COLUMNS.index(name)
        return [row[column] for row in self.rows]


class GpuHistory:
    """The latest readings of every GPU, bounded in number."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[Row]] = {}
        self._series: dict[int, GpuSeries] = {}

    def load(self, number: int, readings: Mapping[str, FloatArray]) -> None:
        """Add stored readings (``RunStore.gpu_history``) that are older than all that are kept."""
        live = self._rows.get(number, deque())
        first = live[0][0] if live else math.inf
        stored = zip(*(readings[name].tolist() for name in _COLUMNS), strict=True)
        older = [row for row in stored if row[0] < first]
        self._rows[number] = deque([*older, *live], maxlen=MAX_SAMPLES)
        self._series.pop(number, None)

    def add(self, gpus: Sequence[GpuSnapshot]) -> None:
        """Add the newest readings. Readings that are kept already are skipped."""
        for gpu in gpus:
            if gpu.sampled_at is None or gpu.error is not None:
                continue
            rows = self._rows.setdefault(gpu.number, deque(maxlen=MAX_SAMPLES))
            if rows and rows[-1][0] >= gpu.sampled_at:
                continue
            values = (getattr(gpu, name) for name in GPU_READINGS)
            rows.append((gpu.sampled_at, *(NAN if v is None else float(v) for v in values)))
            while rows[-1][0] - rows[0][0] > HISTORY_S:
                rows.popleft()
            self._series.pop(gpu.number, None)

    def series(self) -> dict[int, GpuSeries]:
        """Return the series by number of the GPU. Only GPUs with new readings are computed again.

        With more than ``MAX_STRIPS`` GPUs there are no strips.
        """
        has_strips = len(self._rows) <= MAX_STRIPS
        for number, rows in self._rows.items():
            if number not in self._series:
                series = GpuSeries(tuple(rows))
                if has_strips:
                    strip = window_means(series, STRIP_S, STRIP_POINTS)
                    heat = window_means(series, HEAT_S, HEAT_POINTS)
                    series = replace(series, strip=strip, heat=heat)
                self._series[number] = series
        return dict(self._series)


def window_means(series: GpuSeries, width_s: float, points: int) -> tuple[float, ...]:
    """Return the mean utilisation, 0 to 1, in each of the last ``points`` windows.

    The windows have fixed boundaries, so that a value does not change from frame to frame. A window
    without a reading is NaN. Windows before the first reading are left out.
    """
    if not series.rows:
        return ()
    times = series.values("t")
    last = math.floor(times[-1] / width_s)
    sums: dict[int, tuple[float, int]] = {}
    for at, percent in zip(times, series.values("utilisation_percent"), strict=True):
        window = math.floor(at / width_s)
        if window > last - points and math.isfinite(percent):
            total, count = sums.get(window, (0.0, 0))
            sums[window] = total + percent / 100, count + 1
    if not sums:
        return ()
    means = (sums.get(window) for window in range(min(sums), last + 1))
    return tuple(NAN if mean is None else mean[0] / mean[1] for mean in means)
