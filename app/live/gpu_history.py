"""GPU readings of the last minutes, and the averages that strips are drawn from. No clock, no
files."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ltui.training.state.run_snapshot import GpuSnapshot

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


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU; NaN if the driver gave no value. Fractions are 0 to 1."""

    at: float
    """Unix seconds."""
    utilisation: float = NAN
    memory_bytes: float = NAN
    power_w: float = NAN
    temperature_c: float = NAN
    sm: float = NAN
    tensor: float = NAN
    dram: float = NAN


@dataclass(frozen=True, slots=True)
class GpuSeries:
    """Readings of the last minutes of one GPU, oldest first."""

    samples: tuple[GpuSample, ...] = ()
    strip: tuple[float, ...] = ()
    """Mean utilisation in windows of ``STRIP_S`` seconds."""
    heat: tuple[float, ...] = ()
    """Mean utilisation in windows of ``HEAT_S`` seconds."""


class GpuHistory:
    """The latest readings of every GPU, bounded in number."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[GpuSample]] = {}
        self._series: dict[int, GpuSeries] = {}

    def load(self, number: int, samples: Sequence[GpuSample]) -> None:
        """Add stored readings that are older than all readings kept so far."""
        live = self._samples.get(number, deque())
        first = live[0].at if live else math.inf
        older = [s for s in samples if s.at < first]
        self._samples[number] = deque([*older, *live], maxlen=MAX_SAMPLES)
        self._series.pop(number, None)

    def add(self, gpus: Sequence[GpuSnapshot]) -> None:
        """Add the newest readings. Readings that are kept already are skipped."""
        for gpu in gpus:
            if gpu.sampled_at is None or gpu.error is not None:
                continue
            samples = self._samples.setdefault(gpu.number, deque(maxlen=MAX_SAMPLES))
            if samples and samples[-1].at >= gpu.sampled_at:
                continue
            samples.append(_sample(gpu, gpu.sampled_at))
            while samples[-1].at - samples[0].at > HISTORY_S:
                samples.popleft()
            self._series.pop(gpu.number, None)

    def series(self) -> dict[int, GpuSeries]:
        """Return the series by number of the GPU. Only GPUs with new readings are computed again.

        With more than ``MAX_STRIPS`` GPUs there are no strips.
        """
        has_strips = len(self._samples) <= MAX_STRIPS
        for number, samples in self._samples.items():
            if number not in self._series:
                readings = tuple(samples)
                self._series[number] = GpuSeries(
                    readings,
                    window_means(readings, STRIP_S, STRIP_POINTS) if has_strips else (),
                    window_means(readings, HEAT_S, HEAT_POINTS) if has_strips else (),
                )
        return dict(self._series)


def _sample(gpu: GpuSnapshot, at: float) -> GpuSample:
    percent = gpu.utilisation_percent
    values = (
        None if percent is None else percent / 100,
        gpu.memory_used_bytes,
        gpu.power_w,
        gpu.temperature_c,
        gpu.sm_activity,
        gpu.tensor_activity,
        gpu.dram_activity,
    )
    return GpuSample(at, *(NAN if value is None else float(value) for value in values))


def window_means(samples: Sequence[GpuSample], width_s: float, points: int) -> tuple[float, ...]:
    """Return the mean utilisation in each of the last ``points`` windows.

    The windows have fixed boundaries, so that a value does not change from frame to frame. A window
    without a reading is NaN. Windows before the first reading are left out.
    """
    if not samples:
        return ()
    last = math.floor(samples[-1].at / width_s)
    sums: dict[int, tuple[float, int]] = {}
    for sample in samples:
        window = math.floor(sample.at / width_s)
        if window > last - points and math.isfinite(sample.utilisation):
            total, count = sums.get(window, (0.0, 0))
            sums[window] = total + sample.utilisation, count + 1
    if not sums:
        return ()
    means = (sums.get(window) for window in range(min(sums), last + 1))
    return tuple(NAN if mean is None else mean[0] / mean[1] for mean in means)
