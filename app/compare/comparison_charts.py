"""A comparison as charts: the curves of runs and groups over one another. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from ltui.app.compare.alignment import BAND_NAMES
from ltui.app.compare.comparison import Comparison
from ltui.app.compare.view_settings import (
    ViewSettings,
    chosen_metric,
    group_key,
    reference_id,
    shown_runs,
)
from ltui.app.presentation.metric_charts import SMOOTHED, falls_over_decades, is_smoothed
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import ChartSeries, ChartViewModel

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
    grouped = _grouped_runs(comparison) if settings.grouped else set()
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
        series += [
            _series(comparison, run_id, raw[run_id].x, raw[run_id].y, dim=True) for run_id in shown
        ]
    return series + [
        _series(
            comparison,
            run_id,
            smoothed[run_id].x,
            smoothed[run_id].y,
            suffix=SMOOTHED if smoothing > 0 else "",
        )
        for run_id in shown
    ]


def _series(
    comparison: Comparison,
    run_id: str,
    x: np.ndarray,
    y: np.ndarray,
    *,
    dim: bool = False,
    suffix: str = "",
) -> ChartSeries:
    return ChartSeries(
        name=f"{clean_name(comparison.names[run_id])}{suffix}",
        suffix=suffix,
        x=x,
        y=y,
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
                _series(comparison, run_id, lines[run_id].x, lines[run_id].y, dim=True)
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


def _grouped_runs(comparison: Comparison) -> set[str]:
    return {run_id for group in comparison.groups for run_id in group.runs}


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
