"""The x axis of a run's charts: positions of points and of marks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ltui.app.live.curve_arithmetic import epoch_positions, select_points
from ltui.app.live.frame import Frame, MarkKind, RunMark
from ltui.app.live.run_curves import is_gpu_curve
from ltui.training.state.metric_name_patterns import THROUGHPUT
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.curve_reader import Curve, FloatArray
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel

AXES = {
    "step": "step",
    "epoch": "epoch",
    "time": "time",
    "clock": "time of day",
    "samples": "samples",
}
"""Quantities of the x axis, and their names on the screen."""
SAMPLES = "step/samples"
"""Curve from which the axis of samples is computed."""
SIGNS = {
    MarkKind.ATTEMPT: "»",
    MarkKind.CHANGE: "~",
    MarkKind.STALL: "!",
    MarkKind.PAUSE: "=",
    MarkKind.CHECKPOINT: "◆",
}
EPOCH_SIGN = "╵"


class Axis:
    """Computes positions on the chosen x axis."""

    def __init__(self, kind: str, frame: Frame) -> None:
        self._kind = kind
        self._reference = reference_curve(frame)
        self._steps_per_epoch = _steps_per_epoch(frame)
        self._origin = _time_origin(frame, self._reference)
        self._samples = _samples_seen(frame) if kind == "samples" else None
        self.ends = self._ends([*frame.curves.values(), *frame.rates.values()])
        """Start and end of the axis, the same for every chart."""
        self.marks = self._marks(frame)
        self._is_final = frame.snapshot.state not in LIVE

    def chart(self, title: str, series: Sequence[ChartSeries], note: str | None) -> ChartViewModel:
        """Return a chart over this axis. ``note`` is shown in place of missing series."""
        return ChartViewModel(
            title=title,
            series=tuple(series),
            x_label=AXES[self._kind],
            x_time=self._kind == "time",
            x_clock=self._kind == "clock",
            x_whole=self._kind in ("step", "samples"),
            x_ends=self.ends,
            x_is_final=self._is_final,
            marks=self.marks,
            note=note,
        )

    def _ends(self, curves: Sequence[Curve]) -> tuple[float, float] | None:
        ends_of_curves = [self.positions(select_points(c, [0, -1])) for c in curves if len(c)]
        finite_ends = [ends for ends in ends_of_curves if np.isfinite(ends).all()]
        if not finite_ends:
            return None
        return min(float(e[0]) for e in finite_ends), max(float(e[1]) for e in finite_ends)

    def positions(self, curve: Curve) -> FloatArray:
        """Return the position of each point of a curve."""
        if self._kind in ("time", "clock"):
            return curve.times - self._origin if self._kind == "time" else curve.times
        if self._kind == "epoch":
            return epoch_positions(curve.steps, self._reference or curve, self._steps_per_epoch)
        if self._kind == "samples":
            if self._samples is None:
                return np.full(len(curve), np.nan)
            return np.asarray(np.interp(curve.steps, *self._samples), dtype=np.float64)
        return curve.steps

    def steps_between(self, low: float, high: float) -> tuple[int, int] | None:
        """Return the steps of a section of this axis, or None if they are not known."""
        if self._kind == "step":
            return math.floor(low), math.ceil(high)
        if self._reference is None:
            return None
        positions = self.positions(self._reference)
        inside = np.flatnonzero((positions >= low) & (positions <= high))
        if not inside.size:
            return None
        first, last = max(0, inside[0] - 1), min(len(positions) - 1, inside[-1] + 1)
        return int(self._reference.steps[first]), int(self._reference.steps[last])

    # -- marks -----------------------------------------------------------------------------------

    def _marks(self, frame: Frame) -> tuple[ChartMark, ...]:
        if self._reference is None:
            return ()
        marks = chart_marks(frame.marks, self._reference, self.positions)
        return tuple(sorted((*marks, *self._epochs(self._reference)), key=lambda mark: mark.at))

    def _epochs(self, reference: Curve) -> Iterator[ChartMark]:
        epochs, first = np.unique(reference.epochs, return_index=True)
        # The first epoch begins with the run.
        begins = self.positions(select_points(reference, first[1:].tolist()))
        times = reference.times[first[1:]].tolist()
        for epoch, at, time in zip(epochs[1:].tolist(), begins.tolist(), times, strict=True):
            if math.isfinite(epoch) and epoch == round(epoch) and math.isfinite(at):
                text = f"epoch {int(epoch) + 1} begins"
                known = time if math.isfinite(time) else None
                yield ChartMark(at=at, sign=EPOCH_SIGN, text=text, kind="epoch", time=known)


def chart_marks(
    marks: Sequence[RunMark], reference: Curve, positions: Callable[[Curve], FloatArray]
) -> Iterator[ChartMark]:
    """Yield the marks of a run whose place on the x axis is known.

    ``reference`` gives the step of each time, and ``positions`` the place of each point of a curve.
    """
    known = np.isfinite(reference.times)
    steps, times = reference.steps[known], reference.times[known]
    for mark in marks:
        step = math.nan if mark.step is None else mark.step
        time = math.nan if mark.at is None else mark.at
        if mark.step is None and len(steps):
            step = float(np.interp(time, times, steps))
        elif mark.at is None and len(steps):
            time = float(np.interp(step, steps, times))
        point = np.array([[step], [math.nan], [time], [math.nan], [math.nan], [math.nan], [1.0]])
        at = float(positions(Curve(*point))[0])
        if math.isfinite(at):
            line = mark.kind not in (MarkKind.CHECKPOINT, MarkKind.PAUSE)
            yield ChartMark(
                at=at,
                sign=SIGNS[mark.kind],
                text=clean_name(mark.text),
                kind=mark.kind.value,
                line=line,
                time=time if math.isfinite(time) else None,
            )


def marks_legend(marks: Sequence[ChartMark]) -> str:
    """Return the meaning of each sign: ``» attempt  ◆ checkpoint  ╵ epoch``."""
    return "  ".join(dict.fromkeys(f"{m.sign} {m.kind}" for m in marks if m.kind))


def reference_curve(frame: Frame) -> Curve | None:
    """Return the longest curve of training, which gives the epoch and the time of each step."""
    training = [
        curve
        for name, curve in frame.curves.items()
        if name != THROUGHPUT and not is_gpu_curve(name)
    ]
    return max(training, key=len, default=None)


def _steps_per_epoch(frame: Frame) -> float | None:
    run = frame.snapshot
    if run.max_steps and run.max_epochs and run.max_epochs > 0:
        return run.max_steps / run.max_epochs
    return run.batches_per_epoch


def _time_origin(frame: Frame, reference: Curve | None) -> float:
    """Return the start of the time axis in unix seconds: the creation of the run."""
    if frame.snapshot.created_at is not None:
        return frame.snapshot.created_at
    if reference is None or not len(reference):
        return frame.snapshot.started_at or frame.now
    return float(np.nanmin(reference.times))


def _samples_seen(frame: Frame) -> tuple[FloatArray, FloatArray] | None:
    """Return steps, and the samples of all ranks up to each of them; None if they are not known.

    Rank 0's samples count once for each rank of the attempt: the batches of ranks have one size.
    """
    samples = frame.curves.get(SAMPLES)
    if samples is None or not len(samples):
        return None
    first_steps = [first for first, _ in frame.attempt_ranks] or [0]
    ranks = [count for _, count in frame.attempt_ranks] or [frame.snapshot.world_size or 1]
    attempt = np.searchsorted(first_steps, samples.steps, side="left") - 1
    per_point = samples.mean * samples.count * np.array(ranks)[np.maximum(attempt, 0)]
    return samples.steps, np.cumsum(np.where(np.isfinite(per_point), per_point, 0.0))
