"""Arithmetic on curves: append, halve, join, smooth, position on an x axis. Pure, NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ltui.training.state.record_fold import MIN_WINDOW_S, WINDOW_S
from ltui.training.store.curve_reader import Curve, FloatArray

BoolArray = npt.NDArray[np.bool_]

COLUMNS = ("steps", "epochs", "times", "mean", "low", "high", "count")
"""Names of the arrays of ``Curve``."""


def empty_curve() -> Curve:
    """Return a curve without points."""
    return Curve(**{name: np.empty(0) for name in COLUMNS})


def curve_from_rows(rows: FloatArray) -> Curve:
    """Return a curve with one point per row of (step, epoch, time, value)."""
    steps, epochs, times, values = rows.T.copy()
    return Curve(steps, epochs, times, values, values, values, np.ones(len(values)))


class GrowingCurve:
    """A curve that grows at its end in bounded memory.

    At least the last ``recent`` points are kept as they came. Therefore a value computed from the
    end of the curve does not depend on the curve's age. Older points are merged until at most
    ``older`` remain, or dropped if ``older`` is 0.
    """

    def __init__(self, recent: int = 2048, older: int = 2048) -> None:
        self._recent, self._most_older = recent, older
        self._rows = np.empty((2 * recent, 4))
        self._length = 0
        self._older = empty_curve()
        self._merged = 1
        """Number of values in each point of ``_older``."""

    def __len__(self) -> int:
        return len(self._older) + self._length

    def append(self, step: float, epoch: float, time: float, value: float) -> None:
        """Append one point."""
        if self._length == len(self._rows):
            self._merge_older()
        self._rows[self._length] = step, epoch, time, value
        self._length += 1

    def extend(self, rows: FloatArray) -> None:
        """Append ``rows`` of (step, epoch, time, value)."""
        while len(rows):
            if self._length == len(self._rows):
                self._merge_older()
            taken = rows[: len(self._rows) - self._length]
            self._rows[self._length : self._length + len(taken)] = taken
            self._length += len(taken)
            rows = rows[len(taken) :]

    def curve(self) -> Curve:
        """Return a copy, so that a frame does not change later."""
        return concatenate([self._older, curve_from_rows(self._rows[: self._length])])

    def last_rows(self, most: int) -> FloatArray:
        """Return the last points that are kept as they came, at most ``most``, as rows."""
        rows: FloatArray = self._rows[max(0, self._length - most) : self._length].copy()
        return rows

    def _merge_older(self) -> None:
        """Merge the older half of the points that were kept as they came."""
        moved = curve_from_rows(self._rows[: self._recent])
        remaining = self._length - self._recent
        self._rows[:remaining] = self._rows[self._recent : self._length]
        self._length = remaining
        if not self._most_older:
            return
        size = 1
        while size < self._merged and len(moved) > 1:
            moved, size = halve(moved), 2 * size
        self._older = concatenate([self._older, moved])
        while len(self._older) > self._most_older:
            self._older, self._merged = halve(self._older), 2 * self._merged


def concatenate(parts: Sequence[Curve]) -> Curve:
    """Return the curves one after the other as one curve."""
    return Curve(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in COLUMNS})


def halve(curve: Curve) -> Curve:
    """Merge every two neighbouring points: position of the second, mean of the finite values,
    extremes of both.

    A single point at the end stays as it is.
    """
    paired = len(curve) // 2 * 2
    first, second = slice(0, paired, 2), slice(1, paired, 2)
    finite = np.isfinite(curve.mean)
    weights = np.where(finite, np.maximum(curve.count, 1.0), 0.0)
    sums = np.where(finite, curve.mean, 0.0) * weights
    total = weights[first] + weights[second]
    mean = np.where(
        total > 0, (sums[first] + sums[second]) / np.where(total > 0, total, 1.0), np.nan
    )
    merged = Curve(
        **{n: getattr(curve, n)[second] for n in ("steps", "epochs", "times")},
        mean=mean,
        low=np.fmin(curve.low[first], curve.low[second]),
        high=np.fmax(curve.high[first], curve.high[second]),
        count=curve.count[first] + curve.count[second],
    )
    return (
        concatenate([merged, select_points(curve, slice(paired, None))])
        if paired < len(curve)
        else merged
    )


def select_points(curve: Curve, chosen: slice | list[int] | BoolArray) -> Curve:
    """Return the points of a slice, of indices or of a mask."""
    return Curve(**{n: getattr(curve, n)[chosen] for n in COLUMNS})


def splice(curve: Curve, detail: Curve) -> Curve:
    """Return ``curve`` with the points in the range of ``detail`` replaced, if ``detail`` has
    more of them."""
    if not len(detail):
        return curve
    inside = (curve.steps >= detail.steps[0]) & (curve.steps <= detail.steps[-1])
    if int(inside.sum()) >= len(detail):
        return curve
    before, after = curve.steps < detail.steps[0], curve.steps > detail.steps[-1]
    return concatenate([select_points(curve, before), detail, select_points(curve, after)])


def join(stored: Curve | None, live: Curve | None) -> Curve:
    """Return the stored points up to the first live step, then the live points.

    Steps that were repeated after a resume appear once, with the values of the repetition.
    """
    if live is None or not len(live):
        return stored if stored is not None else empty_curve()
    if stored is None or not len(stored):
        return live
    return concatenate([select_points(stored, stored.steps < live.steps[0]), live])


def throughput_curve(samples: Curve, seconds: Curve) -> Curve:
    """Return the throughput of one rank at each point of ``seconds``; both curves are given per
    step.

    The definition is that of ``training/state/throughput.py``: samples divided by seconds of the
    steps in the last ``WINDOW_S`` seconds of step time.
    """
    if len(seconds) < 2 or not len(samples):
        return empty_curve()
    per_step = np.interp(seconds.steps, samples.steps, samples.mean, left=np.nan, right=np.nan)
    timed_points = np.isfinite(per_step) & np.isfinite(seconds.mean) & (seconds.mean > 0)
    if int(timed_points.sum()) < 2:
        return empty_curve()
    timed = select_points(seconds, timed_points)
    spent = np.cumsum(timed.mean * timed.count)
    samples_done = np.cumsum(per_step[timed_points] * timed.count)
    # Start of each point's window: at least one point back, or three if steps are slow.
    index = np.arange(len(spent))
    begin = np.searchsorted(spent, spent - WINDOW_S, side="left")
    begin = np.where(begin == index, np.maximum(index - 3, 0), begin)
    seconds_in, samples_in = spent - spent[begin], samples_done - samples_done[begin]
    valid = (seconds_in >= MIN_WINDOW_S) & (samples_in > 0)
    rate = samples_in[valid] / seconds_in[valid]
    return replace(select_points(timed, valid), mean=rate, low=rate, high=rate)


def sum_curves(curves: Sequence[Curve]) -> Curve:
    """Return the sum of the curves of several ranks at the steps where all of them are known."""
    first, *others = curves
    total = first.mean.copy()
    for other in others:
        if not len(other):
            return empty_curve()
        total += np.interp(first.steps, other.steps, other.mean, left=np.nan, right=np.nan)
    return select_points(replace(first, mean=total, low=total, high=total), np.isfinite(total))


def smooth(curve: Curve, weight: float) -> FloatArray:
    """Return the exponential moving average without the bias of its start, as Adam and TensorBoard
    compute it.

    ``weight``, from 0 to 1, is the fraction of the average that remains at each logged value. A
    point that merges several values counts as that many. NaN leaves a gap.
    """
    if weight <= 0:
        return curve.mean
    finite = np.isfinite(curve.mean)
    keep = np.where(finite, weight ** np.maximum(curve.count, 1.0), 1.0)
    average = np.where(finite, (1 - keep) * np.where(finite, curve.mean, 0.0), 0.0)
    norm = 1 - np.cumprod(keep)
    # average[i] is keep[i] * average[i - 1] + average[i]. Each pass composes twice as many of these
    # steps, so a few passes over the array replace a loop over its points.
    span = 1
    while span < len(average):
        average[span:] += keep[span:] * average[:-span]
        keep[span:] *= keep[:-span]
        span *= 2
    smoothed = np.full(len(curve), np.nan)
    smoothed[finite] = average[finite] / norm[finite]
    return smoothed


def epoch_positions(
    steps: FloatArray, reference: Curve, steps_per_epoch: float | None
) -> FloatArray:
    """Return the positions of ``steps`` on an axis of epochs. ``reference`` gives the first step
    of each epoch."""
    finite = np.isfinite(reference.epochs)
    if not finite.any():
        return np.full(len(steps), np.nan)
    epochs, first = np.unique(reference.epochs[finite], return_index=True)
    begins = reference.steps[finite][first] - 1
    if len(begins) > 1:
        per_epoch = float(np.median(np.diff(begins) / np.diff(epochs)))
    else:
        per_epoch = steps_per_epoch or max(1.0, float(reference.steps[-1] - begins[0]))
    per_epoch = max(per_epoch, 1.0)
    knots_x = np.append(begins, begins[-1] + per_epoch)
    knots_y = np.append(epochs, epochs[-1] + 1)
    return np.asarray(np.interp(steps, knots_x, knots_y), dtype=np.float64)
