"""Arithmetic on curves: append, halve, join, smooth, place on an x axis. Pure, NumPy only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ltui.app.frame import CurveData, FloatArray

COLUMNS = ("steps", "epochs", "times", "mean", "low", "high")


def empty_curve() -> CurveData:
    return CurveData(**{name: np.empty(0) for name in COLUMNS})


def curve_of(rows: FloatArray) -> CurveData:
    """From an array of shape (n, 6), columns as ``COLUMNS``."""
    return CurveData(**{name: rows[:, i] for i, name in enumerate(COLUMNS)})


class GrowingCurve:
    """Points appended one by one, halved in resolution whenever ``max_points`` is reached."""

    def __init__(self, max_points: int = 4096) -> None:
        self._rows = np.empty((max_points, len(COLUMNS)))
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, step: float, epoch: float, time: float, value: float) -> None:
        if self._length == len(self._rows):
            self._halve()
        self._rows[self._length] = (step, epoch, time, value, value, value)
        self._length += 1

    def extend(self, rows: Iterable[tuple[float, float, float, float]]) -> None:
        for row in rows:
            self.append(*row)

    def curve(self) -> CurveData:
        """A copy, so that a frame stays what it was."""
        return curve_of(self._rows[: self._length].copy())

    @property
    def first_step(self) -> float | None:
        return float(self._rows[0, 0]) if self._length else None

    def _halve(self) -> None:
        halved = halve(curve_of(self._rows[: self._length]))
        self._length = len(halved)
        for i, name in enumerate(COLUMNS):
            self._rows[: self._length, i] = getattr(halved, name)


def halve(curve: CurveData) -> CurveData:
    """Every two neighbours as one point: last place, mean of what is finite, extremes of both."""
    even = len(curve) // 2 * 2
    places = {n: getattr(curve, n)[1:even:2] for n in ("steps", "epochs", "times")}
    first, second = slice(0, even, 2), slice(1, even, 2)
    mean = np.where(
        np.isfinite(curve.mean[first]) & np.isfinite(curve.mean[second]),
        (curve.mean[first] + curve.mean[second]) / 2,
        np.fmax(curve.mean[first], curve.mean[second]),
    )
    return CurveData(
        **places,
        mean=mean,
        low=np.fmin(curve.low[first], curve.low[second]),
        high=np.fmax(curve.high[first], curve.high[second]),
    )


def join(stored: CurveData | None, live: CurveData | None) -> CurveData:
    """Stored history up to where the live points begin, then the live points.

    Steps that were done again after a resume are thereby shown once, as they went the second time.
    """
    if live is None or not len(live):
        return stored if stored is not None else empty_curve()
    if stored is None or not len(stored):
        return live
    keep = stored.steps < live.steps[0]
    return CurveData(
        **{n: np.concatenate([getattr(stored, n)[keep], getattr(live, n)]) for n in COLUMNS}
    )


def rate_curve(
    amount: CurveData, seconds: CurveData, factor: float = 1.0, points: int = 500
) -> CurveData:
    """``factor * amount / seconds`` in at most ``points`` windows of at least half a second.

    The ratio is taken of sums, so that a short step does not count as much as a long one.
    """
    if not len(seconds) or not len(amount):
        return empty_curve()
    amounts = np.interp(seconds.steps, amount.steps, amount.mean, left=np.nan, right=np.nan)
    known = np.isfinite(amounts) & np.isfinite(seconds.mean) & np.isfinite(seconds.times)
    if not known.any():
        return empty_curve()
    times = seconds.times[known]
    width = max(0.5, float(times.max() - times.min()) / points)
    window = np.floor((times - times.min()) / width)
    begins = np.flatnonzero(np.diff(window, prepend=-1.0) != 0)
    ends = np.append(begins[1:], len(times)) - 1
    spent = np.add.reduceat(seconds.mean[known], begins)
    done = np.add.reduceat(amounts[known], begins) * factor
    mean = np.where(spent > 0, done / np.where(spent > 0, spent, 1.0), np.nan)
    places = {n: getattr(seconds, n)[known][ends] for n in ("steps", "epochs", "times")}
    return CurveData(**places, mean=mean, low=mean, high=mean)


def smooth(values: FloatArray, weight: float) -> FloatArray:
    """Exponential moving average with the bias of its start removed, as Adam and TensorBoard do.

    ``weight`` in 0 to 1 is what stays of the average at each point; NaN leaves a gap.
    """
    if weight <= 0:
        return values
    out = np.full(len(values), np.nan)
    average, norm = 0.0, 0.0
    for i, value in enumerate(values.tolist()):
        if value - value != 0:  # NaN or infinite
            continue
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out[i] = average / norm
    return out


def epoch_places(
    steps: FloatArray, reference: CurveData, steps_per_epoch: float | None
) -> FloatArray:
    """Where ``steps`` lie on an axis of epochs; ``reference`` tells where each began."""
    known = np.isfinite(reference.epochs)
    if not known.any():
        return np.full(len(steps), np.nan)
    epochs, first = np.unique(reference.epochs[known], return_index=True)
    begins = reference.steps[known][first] - 1
    if len(begins) > 1:
        per_epoch = float(np.median(np.diff(begins) / np.diff(epochs)))
    else:
        per_epoch = steps_per_epoch or max(1.0, float(reference.steps[-1] - begins[0]))
    per_epoch = max(per_epoch, 1.0)
    knots_x = np.append(begins, begins[-1] + per_epoch)
    knots_y = np.append(epochs, epochs[-1] + 1)
    return np.asarray(np.interp(steps, knots_x, knots_y), dtype=np.float64)
