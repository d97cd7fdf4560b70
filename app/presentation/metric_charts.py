"""The charts of metrics and throughput, made from the curves of a frame. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ltui.app.live.curve_arithmetic import epoch_positions, select_points, smooth
from ltui.app.live.default_metrics import default_choice
from ltui.app.live.frame import Frame
from ltui.app.live.metric_history import MAX_RANK_CURVES
from ltui.app.presentation.metric_list import chart_groups, metric_quantity
from ltui.app.presentation.run_view import SAMPLES_PER_S, silence_text
from ltui.app.state_words import is_blocked
from ltui.training.state.metric_name_patterns import LEARNING_RATE, is_evaluation
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.curve_reader import Curve, FloatArray
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import ChartSeries, ChartViewModel

AXES = ("step", "epoch", "time")
"""Quantities of the x axis."""
SMOOTHINGS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Smoothing weights that the keys step through."""
DIFFERENCE = 0.05
"""If the rates of the ranks differ by less than this fraction, only the total is shown."""
WAITING_TOO_LONG = 0.2
"""Fraction of time spent waiting for data above which a remedy is shown."""
MOST_UNSMOOTHED = 3
"""A curve with fewer points than this is not smoothed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartSettings:
    """The settings that the keys of a run screen change."""

    axis: str = "step"
    smoothing: float = 0.9
    metrics: tuple[str, ...] | None = None
    """The metrics that a person chose; None for the default choice."""

    def next_axis(self) -> str:
        """Return the quantity that follows on the x axis."""
        return AXES[(AXES.index(self.axis) + 1) % len(AXES)]

    def next_smoothing(self, steps: int) -> float:
        """Return the smoothing that is ``steps`` places further in ``SMOOTHINGS``."""
        place = min(range(len(SMOOTHINGS)), key=lambda i: abs(SMOOTHINGS[i] - self.smoothing))
        return SMOOTHINGS[min(len(SMOOTHINGS) - 1, max(0, place + steps))]


class Axis:
    """Computes positions on the chosen x axis."""

    def __init__(self, settings: ChartSettings, frame: Frame) -> None:
        self._kind = settings.axis
        self._reference = reference_curve(frame)
        self._steps_per_epoch = _steps_per_epoch(frame)
        self._origin = _time_origin(frame, self._reference)
        self._chart_ends = self._ends([*frame.curves.values(), *frame.rates.values()])
        """Start and end of the axis, the same for every chart."""

    def chart(self, title: str, series: Sequence[ChartSeries], note: str | None) -> ChartViewModel:
        """Return a chart over this axis. ``note`` is shown in place of missing series."""
        return ChartViewModel(
            title=title,
            series=tuple(series),
            x_label=self._kind,
            x_time=self._kind == "time",
            x_whole=self._kind == "step",
            x_ends=self._chart_ends,
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
        if self._kind == "time":
            return curve.times - self._origin
        if self._kind == "epoch":
            return epoch_positions(curve.steps, self._reference or curve, self._steps_per_epoch)
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


def reference_curve(frame: Frame) -> Curve | None:
    """Return the longest curve, which gives the epoch and the time of each step."""
    return max(frame.curves.values(), key=len, default=None)


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


def shown_metrics(frame: Frame, settings: ChartSettings) -> tuple[str, ...]:
    """Return the chosen metrics that this run has, or the default choice if it has none of them."""
    names = frame.curve_names or tuple(sorted(frame.curves))
    chosen = tuple(name for name in settings.metrics or () if name in names)
    return chosen or default_choice(names)


def metric_charts(frame: Frame, settings: ChartSettings) -> list[ChartViewModel]:
    """Return one chart for each quantity among the shown metrics, at least one chart."""
    axis = Axis(settings, frame)
    names = shown_metrics(frame, settings)
    colours = {name: number for number, name in enumerate(names)}
    charts = [
        _metric_chart(frame, axis, settings, [(name, colours[name]) for name in group])
        for group in chart_groups(names)
        if any(name in frame.curves for name in group)
    ]
    return charts or [_metric_chart(frame, axis, settings, [])]


def _metric_chart(
    frame: Frame, axis: Axis, settings: ChartSettings, named: Sequence[tuple[str, int]]
) -> ChartViewModel:
    series: list[ChartSeries] = []
    for name, colour in named:
        curve = frame.curves.get(name)
        if curve is not None and len(curve):
            smoothing = settings.smoothing if is_smoothed(name) else 0.0
            series += _metric_series(name, curve, axis, smoothing, colour)
    title = metric_quantity(named[0][0]) if named else "metrics"
    note = None if series else _empty_chart_note(frame, "no training step yet")
    return replace(axis.chart(clean_name(title), series, note), cut_outliers=True)


def is_smoothed(name: str) -> bool:
    """Return whether a metric is smoothed: values of single steps are noisy.

    Means over a validation and settings such as the learning rate are not smoothed.
    """
    return (
        not is_evaluation(name)
        and name not in ("step/lr", "step/samples")
        and not LEARNING_RATE.search(name)
    )


def _metric_series(
    name: str, curve: Curve, axis: Axis, smoothing: float, colour: int
) -> list[ChartSeries]:
    positions = axis.positions(curve)
    shown = clean_name(name)
    if smoothing <= 0 or len(curve) < MOST_UNSMOOTHED:
        return [_series(shown, positions, curve, colour=colour)]
    smoothed = smooth(curve, smoothing)
    return [
        _series(f"{shown} raw", positions, curve, colour=colour, dim=True),
        ChartSeries(name=f"{shown} smoothed", x=positions, y=smoothed, colour=colour),
    ]


def _series(
    name: str, positions: FloatArray, curve: Curve, *, colour: int, dim: bool = False
) -> ChartSeries:
    banded = bool(np.any(curve.low != curve.high))
    low, high = (curve.low, curve.high) if banded else (None, None)
    return ChartSeries(
        name=name, x=positions, y=curve.mean, colour=colour, dim=dim, low=low, high=high
    )


def metrics_title(charts: Sequence[ChartViewModel]) -> str:
    """Return the title of the panel: the quantity of its only chart, or ``metrics``."""
    return charts[0].title if len(charts) == 1 else "metrics"


def metrics_subtitle(frame: Frame, settings: ChartSettings) -> str:
    """Return validation scores that no curve shows, and the smoothing of the curves."""
    names = shown_metrics(frame, settings)
    quiet = silence_text(frame) if frame.curves else None
    smoothed = any(is_smoothed(name) for name in names)
    smoothing = f"smoothing {settings.smoothing:g}" if settings.smoothing else "raw"
    scores = _score_texts(frame, names)
    return " · ".join([*([quiet] if quiet else []), *scores, *([smoothing] if smoothed else [])])


def _score_texts(frame: Frame, shown: Collection[str]) -> list[str]:
    """Return validation metrics other than the loss: ``val/acc 0.9870``."""
    metrics = frame.snapshot.metrics
    names = sorted(n for n in metrics if is_evaluation(n) and "loss" not in n.lower())
    hidden = [n for n in names if n not in shown][:2]
    return [f"{clean_name(n)} {formats.metric(metrics[n].last)}" for n in hidden]


def throughput_chart(frame: Frame, settings: ChartSettings) -> ChartViewModel:
    """Return the chart of samples per second of all ranks, with a thin line per rank if ranks
    differ."""
    axis = Axis(settings, frame)
    total = frame.rates.get(None)
    series: list[ChartSeries] = []
    if total is not None and len(total):
        series += _rank_series(frame.rates, axis)
        series.append(_series("total", axis.positions(total), total, colour=2))
    note = None if series else _empty_chart_note(frame, "no throughput yet")
    chart = axis.chart("throughput, samples/s", series, note)
    return replace(chart, subtitle=throughput_subtitle(frame))


def _rank_series(rates: Mapping[int | None, Curve], axis: Axis) -> list[ChartSeries]:
    by_rank = {rank: curve for rank, curve in rates.items() if rank is not None and len(curve)}
    if not 1 < len(by_rank) <= MAX_RANK_CURVES or not _rates_differ(list(by_rank.values())):
        return []
    return [
        _series(f"r{rank}", axis.positions(curve), curve, colour=3 + rank, dim=True)
        for rank, curve in sorted(by_rank.items())
    ]


def _rates_differ(curves: list[Curve]) -> bool:
    lately = [float(np.nanmean(c.mean[-20:])) for c in curves]
    return max(lately) - min(lately) > DIFFERENCE * max(lately)


def throughput_subtitle(frame: Frame) -> str:
    """Return ``31.4 k samples/s · best 32.0 k``; ``paused`` or ``stalled`` replaces a rate."""
    best = best_throughput(frame)
    parts = []
    if frame.snapshot.state in LIVE:
        parts.append(_current_rate(frame.snapshot))
    if best is not None:
        parts.append(f"best {formats.quantity(best, '')}")
    share = frame.snapshot.model_flop_utilisation
    if share is not None and frame.snapshot.state in LIVE:
        parts.append(f"MFU {formats.percent(share)}")
    return " · ".join(parts)


def _current_rate(run: RunSnapshot) -> str:
    if run.state is RunState.PAUSED:
        return "paused"
    if is_blocked(run):
        return "stalled"
    return formats.quantity(run.throughput.samples_per_s, SAMPLES_PER_S)


def best_throughput(frame: Frame) -> float | None:
    """Return the highest throughput of all attempts, at least the highest value of the chart."""
    stored = frame.snapshot.throughput.best_samples_per_s
    total = frame.rates.get(None)
    drawn = float(np.nanmax(total.mean)) if total is not None and len(total) else None
    return max((rate for rate in (stored, drawn) if rate is not None), default=None)


def data_wait_text(frame: Frame) -> str:
    """Return ``waiting for data 4 %``, with a remedy if it is much."""
    share = frame.snapshot.throughput.data_wait_share
    text = f"waiting for data {formats.percent(share)}"
    if share is not None and share > WAITING_TOO_LONG:
        text += " · ranks wait for data: use more workers or a faster loader"
    return text


def step_phases_text(frame: Frame) -> str:
    """Return the fractions of a step: ``fetch 4 · forward 31 · backward 58 · optimizer 7 %``."""
    throughput = frame.snapshot.throughput
    shares = (
        ("fetch", throughput.fetch_share),
        ("forward", throughput.forward_share),
        ("backward", throughput.backward_share),
        ("optimizer", throughput.optimizer_share),
    )
    parts = [f"{name} {formats.percent(share)}" for name, share in shares if share is not None]
    return " · ".join(parts)


def step_time_text(frame: Frame) -> str:
    """Return both lines below the throughput chart."""
    return "\n".join(line for line in (data_wait_text(frame), step_phases_text(frame)) if line)


def _empty_chart_note(frame: Frame, otherwise: str) -> str:
    run = frame.snapshot
    quiet = silence_text(frame)
    if quiet:
        return quiet
    if run.state not in LIVE:
        return "nothing was recorded"
    if run.started_at is None or run.state is RunState.PAUSED:
        return otherwise
    if run.state is RunState.RUNNING and run.ranks and all(r.phase is None for r in run.ranks):
        # A program without Lightning may be training, but only its processes are known.
        otherwise = "no telemetry"
    # Importing torch and preparing data take a while, so show the time since the start.
    return f"{otherwise}, {formats.duration(frame.now - run.started_at)} after the start"
