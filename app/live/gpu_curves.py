"""Readings of GPUs as curves over the steps of a run, so that they are metrics like any other."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

from ltui.app.live.curve_arithmetic import concatenate, empty_curve
from ltui.training.state.run_snapshot import GpuSnapshot
from ltui.training.store.curve_reader import Curve, FloatArray, merge_points, to_curve
from ltui.training.store.history_reader import RunStore

GIB = float(1 << 30)
STORED_S = 6 * 3600.0
"""Seconds of stored readings that a curve begins with; the store keeps no more."""
MAX_POINTS = 2000
"""Maximum number of points that stored readings are merged into."""
_READINGS = {
    "utilisation_percent": ("utilisation_percent", 1.0),
    "memory_gib": ("memory_used_bytes", 1 / GIB),
    "power_w": ("power_w", 1.0),
    "temperature_c": ("temperature_c", 1.0),
}
"""Last part of a curve's name -> field of a reading, and the factor of its values."""
_NAME = re.compile(r"gpu/(\d+)/(\w+)")


def gpu_curve_names(gpus: Sequence[GpuSnapshot]) -> list[str]:
    """Return the names of all curves of these GPUs: ``gpu/0/power_w``."""
    return [f"gpu/{gpu.number}/{reading}" for gpu in gpus for reading in _READINGS]


def is_gpu_curve(name: str) -> bool:
    """Return whether a name is that of a GPU's curve, not of a logged metric."""
    match = _NAME.fullmatch(name)
    return match is not None and match[2] in _READINGS


class GpuCurves:
    """The requested curves of GPUs: stored readings, then those of each new snapshot."""

    def __init__(self) -> None:
        self.version = 0
        """Changes when a curve changes."""
        self._curves: dict[str, Curve] = {}
        self._last_at: dict[int, float] = {}

    def curves(self) -> dict[str, Curve]:
        """Return the loaded curves by name."""
        return dict(self._curves)

    def add(self, gpus: Sequence[GpuSnapshot], step: float, epoch: float) -> None:
        """Add the newest readings, taken at this step. Readings that were added are skipped."""
        for gpu in gpus:
            at = gpu.sampled_at
            if at is None or gpu.error is not None or at <= self._last_at.get(gpu.number, 0.0):
                continue
            self._last_at[gpu.number] = at
            for reading, (field, factor) in _READINGS.items():
                name, value = f"gpu/{gpu.number}/{reading}", getattr(gpu, field)
                if value is None or name not in self._curves:
                    continue
                value *= factor
                point = to_curve([(step, epoch, at, value, value, value, 1)])
                curve = concatenate([self._curves[name], point])
                if len(curve) > 2 * MAX_POINTS:
                    curve = merge_points(curve, MAX_POINTS)
                self._curves[name] = curve
                self.version += 1

    def read(self, store: RunStore, names: Collection[str], training: Curve) -> None:
        """Load stored readings. ``training`` gives the step and the epoch of each time."""
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            readings = store.gpu_history(int(match[1]), STORED_S)
            field, factor = _READINGS[match[2]]
            self._curves[name] = _over_steps(readings["t"], factor * readings[field], training)
            self.version += 1

    def forget(self, names: Collection[str]) -> None:
        """Drop these curves."""
        for name in names:
            self._curves.pop(name, None)


def _over_steps(times: FloatArray, values: FloatArray, training: Curve) -> Curve:
    finite = np.isfinite(training.times)
    if not len(times) or not finite.any():
        return empty_curve()
    order = np.argsort(training.times[finite], kind="stable")
    known, steps = training.times[finite][order], training.steps[finite][order]
    epochs = training.epochs[finite][order]
    # Several readings may belong to one step, as during a validation.
    at = np.maximum.accumulate(np.interp(times, known, steps))
    curve = Curve(
        at, np.interp(times, known, epochs), times, values, values, values, np.ones(len(times))
    )
    return merge_points(curve, MAX_POINTS)
