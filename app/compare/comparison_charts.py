"""What the screen of a comparison shows: what a person has chosen there, and its charts. Pure.

The charts are curves over one another, and parallel coordinates. The latter have one axis for each
setting that differs, and one for a metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ltui.app.compare.alignment import BAND_NAMES, BANDS, Line
from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison, RunGroup
from ltui.app.presentation.metric_charts import (
    SMOOTHED,
    ChartSettings,
    falls_over_decades,
    is_smoothed,
)
from ltui.app.presentation.run_configuration import number_of
from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import AxisRange, linear_ticks, log_ticks
from ltui.widgets.charts.parallel_plot import ParallelAxis, ParallelLine, ParallelViewModel
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.view_models import ChartSeries, ChartViewModel


class ViewSettings(Struct, frozen=True, kw_only=True):
    """What the keys of the screen change."""

    metric: str | None = None
    """The metric of the table, whose chart comes first; None for the first one."""
    chart: ChartSettings = field(default_factory=ChartSettings)
    grouped: bool = False
    band: str = BANDS[0]
    reference: str | None = None
    """Id of the pinned run; None for the first one that has a value of the metric."""
    hidden: frozenset[str] = frozenset()
    """Keys of runs and groups whose curves are not drawn."""
    opened: frozenset[str] = frozenset()
    """Keys of groups whose members are shown."""
    equal: bool = False
    """The settings that are the same in all runs are listed, not only counted."""
    order: str | None = None
    """Key of the column by which the rows are sorted; None for the order of the runs."""
    reversed: bool = False
    value: str = "best"
    """The value of the metric in the parallel coordinates: ``best`` or ``final``."""

    def next_band(self) -> str:
        """Return the kind of band that follows."""
        return BANDS[(BANDS.index(self.band) + 1) % len(BANDS)]


def group_key(group: RunGroup) -> str:
    """Return the key of a group in tables; ids of runs contain no blank."""
    return f"group {group.label}"


def chosen_metric(comparison: Comparison, settings: ViewSettings) -> str | None:
    """Return the metric of the table; None if no run has logged any."""
    if settings.metric in comparison.metrics:
        return settings.metric
    return next(iter(comparison.metrics), None)


def reference_id(comparison: Comparison, settings: ViewSettings) -> str:
    """Return the id of the run with which the others are compared."""
    pinned = settings.reference
    if pinned in comparison.by_id:
        return pinned
    metric = chosen_metric(comparison, settings)
    having = (run.id for run in comparison.runs if comparison.best_of(run, metric) is not None)
    return next(having, comparison.runs[0].id)


def shown_runs(comparison: Comparison, settings: ViewSettings) -> list[ComparedRun]:
    """Return the runs that are not hidden, neither by themselves nor with their group."""
    hidden = set(settings.hidden)
    for group in comparison.groups if settings.grouped else ():
        if group_key(group) in hidden:
            hidden.update(group.runs)
    return [run for run in comparison.runs if run.id not in hidden]


MAX_RAW = 4
"""Maximum number of runs whose raw values are drawn behind the smoothed curves."""
MAX_GROUP_NAME = 16
"""Maximum cells of the name of a group in a legend that also names the settings."""


def comparison_charts(comparison: Comparison, settings: ViewSettings) -> list[ChartViewModel]:
    """Return one chart for each metric, that of the table first."""
    first = chosen_metric(comparison, settings)
    names = sorted(comparison.metrics, key=lambda name: name != first)
    charts = [_chart(comparison, settings, name) for name in names]
    ends = [series.x[[0, -1]] for chart in charts for series in chart.series if series.x.size]
    if not ends:
        return charts or [ChartViewModel(title="metrics", note="these runs have logged nothing")]
    x_ends = (float(min(end[0] for end in ends)), float(max(end[1] for end in ends)))
    return [replace(chart, x_ends=x_ends) for chart in charts]


def _chart(comparison: Comparison, settings: ViewSettings, metric: str) -> ChartViewModel:
    smoothing = settings.chart.smoothing if is_smoothed(metric) else 0.0
    series = _group_series(comparison, settings, metric, smoothing) if settings.grouped else []
    grouped = comparison.grouped if settings.grouped else set()
    alone = [run.id for run in comparison.runs if run.id not in grouped | settings.hidden]
    series += _run_series(comparison, metric, smoothing, alone)
    axis = comparison.axis
    # The reference is drawn last, over the others.
    pinned = clean_name(comparison.names[reference_id(comparison, settings)])
    series.sort(key=lambda one: one.name.removesuffix(one.suffix) == pinned)
    runs = shown_runs(comparison, settings)
    shown = [run.curves[metric] for run in runs if metric in run.curves]
    return ChartViewModel(
        title=clean_name(metric),
        log_y=falls_over_decades(shown),
        series=tuple(series),
        # Charts of several metrics have the same legend, so the axis names the metric.
        x_label=f"{clean_name(metric)} by {axis}",
        x_time=axis == "time",
        x_whole=axis == "step",
        x_is_final=not any(run.live for run in comparison.runs),
        cut_outliers=True,
        note=None if series else "no shown run has logged it",
    )


def _run_series(
    comparison: Comparison, metric: str, smoothing: float, run_ids: Sequence[str]
) -> list[ChartSeries]:
    """Return the curves of some runs, with the raw values behind if there are few."""
    smoothed = comparison.lines(metric, smoothing)
    shown = [run_id for run_id in run_ids if run_id in smoothed]
    series = []
    if smoothing > 0 and len(shown) <= MAX_RAW:
        raw = comparison.lines(metric)
        series += [_series(comparison, run_id, raw[run_id], dim=True) for run_id in shown]
    suffix = SMOOTHED if smoothing > 0 else ""
    return series + [
        _series(comparison, run_id, smoothed[run_id], suffix=suffix) for run_id in shown
    ]


def _series(
    comparison: Comparison, run_id: str, line: Line, *, dim: bool = False, suffix: str = ""
) -> ChartSeries:
    return ChartSeries(
        name=f"{clean_name(comparison.names[run_id])}{suffix}",
        suffix=suffix,
        x=line.x,
        y=line.y,
        colour=comparison.colours[run_id],
        dim=dim,
        is_logged=True,
    )


def _group_series(
    comparison: Comparison, settings: ViewSettings, metric: str, smoothing: float
) -> list[ChartSeries]:
    series: list[ChartSeries] = []
    for group in comparison.groups:
        curve = comparison.group_curve(group, metric, smoothing)
        if curve is None or group_key(group) in settings.hidden:
            continue
        if group_key(group) in settings.opened:
            lines = comparison.lines(metric, smoothing)
            series += [
                _series(comparison, run_id, lines[run_id], dim=True)
                for run_id in group.runs
                if run_id in lines
            ]
        x, band = curve
        colour = comparison.colours[group.runs[0]]
        # A legend cuts long names in the middle, where values begin.
        name = group.label if len(group.label) <= MAX_GROUP_NAME else group.values
        complete = np.flatnonzero(band.count == band.count.max())
        first, last = int(complete[0]), int(complete[-1]) + 1
        # Where a member has not begun or has ended, the mean is that of fewer runs.
        for part, dim in (
            (slice(0, first + 1), True),
            (slice(last - 1, None), True),
            (slice(first, last), False),
        ):
            if len(x[part]) > 1 or not dim:
                series.append(
                    ChartSeries(
                        name=f"{name} ({len(group.runs)})",
                        x=x[part],
                        y=band.mean[part],
                        colour=colour,
                        dim=dim,
                        low=band.low[part],
                        high=band.high[part],
                    )
                )
    return series


def charts_caption(comparison: Comparison, settings: ViewSettings) -> str:
    """Return how the curves are drawn: ``by step · smoothing 0.9 · groups: min to max``."""
    parts = [f"by {comparison.axis}"]
    if any(is_smoothed(name) for name in comparison.metrics):
        weight = settings.chart.smoothing
        parts.append(f"smoothed, {weight:g}" if weight else "raw")
    if settings.grouped:
        parts.append(f"mean, {BAND_NAMES[settings.band]}; faint: fewer runs")
    if settings.hidden:
        parts.append(f"{len(settings.hidden)} hidden")
    return " · ".join(parts)


MIN_RATIO = 10.0
"""Minimum ratio of the largest to the smallest value for an axis to be logarithmic."""
MAX_OWN_TICKS = 7
"""An axis with at most so many different values has a label for each of them."""
MISSING_SHARE = 0.12
"""Part of an axis, at its foot, for the runs without a value, if there are any."""

Scaled = tuple[ParallelAxis, dict[str, float]]


def parallel_view(comparison: Comparison, settings: ViewSettings) -> ParallelViewModel:
    """Return one axis for each setting that differs, the metric as the last one, and all shown
    runs."""
    metric = chosen_metric(comparison, settings)
    names = comparison.parameters
    if metric is None or not names:
        note = "these runs have logged nothing" if names else "no setting differs"
        return ParallelViewModel(note=note)
    scaled = [
        scaled_axis(
            clean_name(name.rpartition(".")[2]),
            {run.id: run.settings.get(name) for run in comparison.runs},
        )
        for name in names
    ]
    word = settings.value
    if word == "best" and comparison.direction(metric) is None:
        word = "lowest"
    results = {run.id: _result(comparison, run, metric, settings.value) for run in comparison.runs}
    scaled.append(scaled_axis(f"{word} {clean_name(metric)}", results))
    lines = [
        ParallelLine(
            key=run.id,
            name=clean_name(comparison.names[run.id]),
            colour=comparison.colours[run.id],
            places=tuple(places[run.id] for _, places in scaled),
        )
        for run in shown_runs(comparison, settings)
    ]
    return ParallelViewModel(axes=tuple(axis for axis, _ in scaled), lines=tuple(lines))


def _result(comparison: Comparison, run: ComparedRun, metric: str, value: str) -> float | None:
    if value == "best":
        logged = comparison.best_of(run, metric)
    else:
        logged = run.metrics[metric].final if metric in run.metrics else None
    return None if logged is None else logged.value


def scaled_axis(title: str, values: Mapping[str, float | str | None]) -> Scaled:
    """Return an axis for the values of the runs, and the place of each run on it.

    The axis is numeric if all known values are numbers, and logarithmic if that spreads them more
    evenly. Otherwise each text has its own place. Values that are missing or not finite are at the
    foot, below the others.
    """
    texts = {run_id: value for run_id, value in values.items() if value is not None}
    numbers = {run_id: number_of(value) for run_id, value in texts.items()}
    is_text = any(
        number is None and isinstance(texts[run_id], str) for run_id, number in numbers.items()
    )
    if is_text:
        words = sorted({str(text) for text in texts.values()})
        known = {run_id: float(words.index(str(text))) for run_id, text in texts.items()}
        ticks = [(float(place), clean_line(word, 40)) for place, word in enumerate(words)]
    else:
        known = {run_id: number for run_id, number in numbers.items() if number is not None}
        logarithmic = is_logarithmic(list(known.values()))
        if logarithmic:
            title = f"log {title}"
            known = {run_id: math.log10(number) for run_id, number in known.items()}
        ticks = _ticks(known, texts, logarithmic=logarithmic)
    foot = MISSING_SHARE if len(known) < len(values) else 0.0
    low, high = min(known.values(), default=0.0), max(known.values(), default=0.0)

    def place(value: float) -> float:
        # Halves, because the difference of two huge numbers is infinite.
        span = high / 2 - low / 2
        share = (value / 2 - low / 2) / span if span > 0 else 0.5
        return foot + (1 - foot) * share

    labels = [(place(at), text) for at, text in ticks]
    if foot:
        labels.append((0.0, NA))
    places = {run_id: place(known[run_id]) if run_id in known else 0.0 for run_id in values}
    return ParallelAxis(title=title, ticks=tuple(labels)), places


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether a logarithmic axis spreads the values more evenly than a linear one."""
    different = np.unique(np.array(values, dtype=np.float64))
    if not different.size or different[0] <= 0 or different[-1] / MIN_RATIO < different[0]:
        return False
    return _widest_gap(np.log10(different)) < _widest_gap(different) - 1e-9


def _widest_gap(ascending: np.ndarray) -> float:
    """Return the widest gap between two neighbours as a part of the whole range."""
    return float(np.diff(ascending).max() / (ascending[-1] - ascending[0]))


def _ticks(
    known: Mapping[str, float], texts: Mapping[str, float | str], *, logarithmic: bool
) -> list[tuple[float, str]]:
    """Return the values themselves if there are few, as they were written; else round numbers."""
    own = {at: texts[run_id] for run_id, at in known.items()}
    if len(own) <= MAX_OWN_TICKS:
        return [
            (at, clean_line(value, 40) if isinstance(value, str) else formats.metric(value))
            for at, value in own.items()
        ]
    within = AxisRange(min(known.values()), max(known.values()))
    ticks = log_ticks(within, MAX_OWN_TICKS) if logarithmic else linear_ticks(within, MAX_OWN_TICKS)
    return [(tick.at, tick.label) for tick in ticks]
