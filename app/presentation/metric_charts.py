"""The charts of metrics and throughput, made from the curves of a frame. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ltui.app.live.curve_arithmetic import STEP_SECONDS, default_choice, smooth
from ltui.app.live.frame import Frame
from ltui.app.presentation.chart_axis import AXES, SAMPLES, Axis
from ltui.app.presentation.metric_names import chart_groups, metric_quantity, pattern_hint
from ltui.app.presentation.run_view import silence_text
from ltui.app.presentation.snapshot_text import STEPS_PER_S, rate
from ltui.app.state_words import is_blocked
from ltui.training.shared.record_types import StepField
from ltui.training.state.metric_name_patterns import (
    LEARNING_RATE,
    MAX_RANK_RATES,
    THROUGHPUT,
    is_evaluation,
)
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.curve_reader import Curve, FloatArray
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import ChartSeries, ChartViewModel

SMOOTHINGS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Smoothing weights that the keys step through."""
STEP_SMOOTHING = 0.9
"""Smoothing of steps per second: single steps differ much."""
DIFFERENCE = 0.05
"""If the rates of the ranks differ by less than this fraction, only the total is shown."""
WAITING_TOO_LONG = 0.2
"""Fraction of time spent waiting for data above which a remedy is shown."""
FALL_FOR_LOG = 100.0
"""Factor by which a curve must fall for its chart to choose a logarithmic axis."""
SMOOTHED = " smoothed"
"""End of the name of a smoothed curve in a legend."""
MOST_UNSMOOTHED = 3
"""A curve with fewer points than this is not smoothed."""


class ChartSettings(Struct, frozen=True, kw_only=True):
    """The settings that the keys of a run screen change."""

    axis: str = "step"
    smoothing: float = 0.9
    metrics: tuple[str, ...] | None = None
    """The metrics that a person chose; None for the default choice."""
    second: tuple[str, ...] | None = None
    """The metrics of the second panel, all in one chart; None for the throughput of each rank."""
    joined: bool = False
    """Draw all metrics of the first panel in one chart, not one chart for each quantity."""
    every: bool = False
    """Draw as many metrics as fit in the first panel, each in a small chart."""

    def next_axis(self) -> str:
        """Return the quantity that follows on the x axis."""
        axes = list(AXES)
        return axes[(axes.index(self.axis) + 1) % len(axes)]

    def next_smoothing(self, steps: int) -> float:
        """Return the smoothing that is ``steps`` places further in ``SMOOTHINGS``."""
        place = min(range(len(SMOOTHINGS)), key=lambda i: abs(SMOOTHINGS[i] - self.smoothing))
        return SMOOTHINGS[min(len(SMOOTHINGS) - 1, max(0, place + steps))]

    def to_json(self) -> dict[str, Any]:
        """Return what is remembered: the axis and the smoothing, unless they are the default."""
        chosen = {"axis": self.axis, "smoothing": self.smoothing}
        default = ChartSettings()
        return {key: value for key, value in chosen.items() if value != getattr(default, key)}

    def with_json(self, document: object) -> ChartSettings:
        """Return these settings with the remembered ones. What is damaged is left out."""
        if not isinstance(document, dict):
            return self
        axis, smoothing = document.get("axis"), document.get("smoothing")
        return replace(
            self,
            axis=axis if isinstance(axis, str) and axis in AXES else self.axis,
            smoothing=smoothing if smoothing in SMOOTHINGS else self.smoothing,
        )


def shown_metrics(frame: Frame, settings: ChartSettings) -> tuple[str, ...]:
    """Return the chosen metrics that this run has, or the default choice if it has none of them."""
    names = frame.curve_names or tuple(sorted(frame.curves))
    chosen = tuple(name for name in settings.metrics or () if name in names)
    return chosen or default_choice(names)


def metric_charts(frame: Frame, settings: ChartSettings) -> list[ChartViewModel]:
    """Return one chart for each quantity among the shown metrics, at least one chart."""
    axis = Axis(settings.axis, frame)
    names = shown_metrics(frame, settings)
    if settings.joined and names:
        return [one_chart(frame, settings, names)]
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
            added = _metric_series(name, curve, axis, smoothing, colour)
            # A step without a learning rate, for example, has NaN as well.
            is_logged = name in frame.snapshot.metrics
            series += [replace(one, is_logged=is_logged) for one in added]
    title = metric_quantity(named[0][0]) if named else "metrics"
    note = None if series else _no_metrics_note(frame)
    curves = [frame.curves[name] for name, _ in named if name in frame.curves]
    chart = axis.chart(clean_name(title), series, note)
    return replace(
        chart,
        cut_outliers=True,
        log_y=falls_over_decades(curves),
        is_rate=bool(named) and all(name == THROUGHPUT for name, _ in named),
    )


def falls_over_decades(curves: Sequence[Curve]) -> bool:
    """Return whether a linear axis would hide the end of one of the curves, all of them positive.

    A curve falls over decades if its last tenth is usually below a hundredth of its first tenth.
    """
    filled = [curve.mean[np.isfinite(curve.mean)] for curve in curves]
    filled = [values for values in filled if len(values) >= MOST_UNSMOOTHED]
    if not filled or any(values.min() <= 0 for values in filled):
        return False
    for values in filled:
        tenth = max(1, len(values) // 10)
        # Not np.median, whose first call imports the masked arrays of NumPy.
        first, last = np.sort(values[:tenth])[tenth // 2], np.sort(values[-tenth:])[tenth // 2]
        if first >= FALL_FOR_LOG * last:
            return True
    return False


def one_chart(frame: Frame, settings: ChartSettings, names: Sequence[str]) -> ChartViewModel:
    """Return one chart with all of these metrics."""
    named = [(name, colour) for colour, name in enumerate(names)]
    chart = _metric_chart(frame, Axis(settings.axis, frame), settings, named)
    return replace(chart, title=", ".join(clean_name(name) for name in names))


def charts_of_names(
    frame: Frame, settings: ChartSettings, names: Sequence[str]
) -> list[ChartViewModel]:
    """Return one chart for each of these metrics, with its full name as title."""
    axis = Axis(settings.axis, frame)
    charts = []
    for name in names:
        chart = _metric_chart(frame, axis, settings, [(name, 0)])
        # A frame made for other charts does not have the curve yet.
        note = chart.note if name in frame.curves else "reading"
        title = clean_name(name)
        series = tuple(replace(s, name=s.name.removeprefix(title).strip()) for s in chart.series)
        charts.append(replace(chart, title=title, series=series, note=None if series else note))
    return charts


def requested_names(names: Iterable[str], settings: ChartSettings) -> frozenset[str]:
    """Return the curves that charts of these metrics need, with those that the x axis needs."""
    return frozenset({*names, *((SAMPLES,) if settings.axis == "samples" else ())})


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
    finite = np.flatnonzero(np.isfinite(curve.mean))
    # Smoothing skips what is not finite, but the newest value must not hide that it is NaN.
    smoothed[finite[-1] + 1 if finite.size else 0 :] = np.nan
    return [
        _series(f"{shown} raw", positions, curve, colour=colour, dim=True),
        ChartSeries(
            name=f"{shown}{SMOOTHED}", x=positions, y=smoothed, colour=colour, suffix=SMOOTHED
        ),
    ]


def _series(
    name: str, positions: FloatArray, curve: Curve, *, colour: int, dim: bool = False
) -> ChartSeries:
    banded = bool(np.any(curve.low != curve.high))
    low, high = (curve.low, curve.high) if banded else (None, None)
    return ChartSeries(
        name=name, x=positions, y=curve.mean, colour=colour, dim=dim, low=low, high=high
    )


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


def second_chart(frame: Frame, settings: ChartSettings) -> ChartViewModel:
    """Return the chart of the second panel: the chosen metrics, or the throughput."""
    names = [name for name in settings.second or () if name in frame.curve_names]
    return one_chart(frame, settings, names) if names else throughput_chart(frame, settings)


def throughput_chart(frame: Frame, settings: ChartSettings) -> ChartViewModel:
    """Return the chart of samples per second of all ranks, with a thin line per rank if ranks
    differ."""
    axis = Axis(settings.axis, frame)
    total, steps = frame.rates.get(None), frame.curves.get(STEP_SECONDS)
    series: list[ChartSeries] = []
    if total is not None and len(total):
        series += _rank_series(frame.rates, axis)
        series.append(_series("total", axis.positions(total), total, colour=2))
    elif steps is not None and len(steps) and not _rate_is_expected(frame):
        per_s = 1 / np.maximum(smooth(steps, STEP_SMOOTHING), 1e-9)
        positions = axis.positions(steps)
        series.append(ChartSeries(name=STEPS_PER_S, x=positions, y=per_s, colour=2))
        chart = axis.chart(STEPS_PER_S, series, None)
        return replace(chart, subtitle=_steps_subtitle(frame.snapshot), is_rate=True)
    note = None if series else _empty_chart_note(frame, "no throughput yet")
    chart = axis.chart("throughput, samples/s", series, note)
    return replace(chart, subtitle=throughput_subtitle(frame), is_rate=True)


def _rank_series(rates: Mapping[int | None, Curve], axis: Axis) -> list[ChartSeries]:
    by_rank = {rank: curve for rank, curve in rates.items() if rank is not None and len(curve)}
    if not 1 < len(by_rank) <= MAX_RANK_RATES or not _rates_differ(list(by_rank.values())):
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
    best = frame.snapshot.throughput.best_samples_per_s
    parts = []
    if frame.snapshot.state in LIVE:
        parts.append(_current_rate(frame.snapshot))
    if best is not None:
        parts.append(f"best {formats.rate(best, '')}")
    share = frame.snapshot.model_flop_utilisation
    if share is not None and frame.snapshot.state in LIVE:
        parts.append(f"MFU {formats.percent(share)}")
    return " · ".join(parts)


def _rate_is_expected(frame: Frame) -> bool:
    """Return whether the first point of the throughput is still to come."""
    known = any(row[StepField.SAMPLES] > 0 for row in frame.last_steps.values())
    return known and frame.snapshot.state in LIVE


def _steps_subtitle(run: RunSnapshot) -> str:
    """Return ``12.3 steps/s``, for a run of which only the steps are known."""
    if run.state not in LIVE or run.throughput.steps_per_s is None:
        return ""
    return formats.rate(run.throughput.steps_per_s, STEPS_PER_S)


def _no_metrics_note(frame: Frame) -> str:
    """Return why there is no metric: a program without Lightning may only print its values."""
    run = frame.snapshot
    asked = frame.spec is not None and frame.spec.metrics_pattern is not None
    if run.program is None or run.metrics or asked or not (run.global_step or frame.curve_names):
        return _empty_chart_note(frame, "no training step yet")
    return f"ltui sees no metrics of this program. {pattern_hint(frame.log)}"


def _current_rate(run: RunSnapshot) -> str:
    if run.state is RunState.PAUSED:
        return "paused"
    if is_blocked(run):
        return "stalled"
    return rate(run.throughput.samples_per_s)


def data_wait_text(frame: Frame) -> str:
    """Return a remedy if the ranks wait much for data; empty if they do not."""
    share = frame.snapshot.throughput.data_wait_share
    if share is None or share <= WAITING_TOO_LONG:
        return ""
    return f"waiting for data {formats.percent(share)}: use more workers or a faster loader"


def step_phases_text(frame: Frame) -> str:
    """Return the parts of a step, which add up to 100 %: ``data 4 · forward 31 · ... · other 7 %``.

    ``data`` is the time that the ranks wait for the next batch.
    """
    throughput = frame.snapshot.throughput
    known = [
        (name, share)
        for name, share in (
            ("data", throughput.fetch_share),
            ("forward", throughput.forward_share),
            ("backward", throughput.backward_share),
            ("optimizer", throughput.optimizer_share),
        )
        if share is not None
    ]
    if not known:
        return ""
    rounded = [round(100 * share) for _, share in known]
    parts = [f"{name} {number}" for (name, _), number in zip(known, rounded, strict=True)]
    other = 100 - sum(rounded)
    # A program of which only the wait for data is known has no other parts to compare with.
    if [name for name, _ in known] != ["data"] and other > 0:
        parts.append(f"other {other}")
    return f"step time: {' · '.join(parts)} %"


def step_time_text(frame: Frame) -> str:
    """Return both lines below the throughput chart."""
    return "\n".join(line for line in (data_wait_text(frame), step_phases_text(frame)) if line)


def _empty_chart_note(frame: Frame, otherwise: str) -> str:
    run = frame.snapshot
    quiet = silence_text(frame)
    if quiet:
        return quiet
    if run.state not in LIVE or frame.is_unknown:
        return "nothing was recorded"
    if run.program is not None and run.global_step:
        return f"ltui sees no metrics of this program ({clean_name(run.program)})"
    if run.started_at is None or run.state is RunState.PAUSED:
        return otherwise
    if run.state is RunState.RUNNING and run.ranks and all(r.phase is None for r in run.ranks):
        # A program without Lightning may be training, but only its processes are known.
        otherwise = "no steps seen"
    # Importing torch and preparing data take a while, so show the time since the start.
    return f"{otherwise}, {formats.duration(frame.now - run.started_at)} after the start"
