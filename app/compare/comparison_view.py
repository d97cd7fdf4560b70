"""A comparison as charts and table rows for the dashboard. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ltui.app.compare.bands import BAND_NAMES, BANDS
from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison, Spread
from ltui.app.compare.comparison_report import logged_text, step_text
from ltui.app.compare.metric_summary import Logged, MetricSummary
from ltui.app.compare.run_groups import RunGroup
from ltui.app.presentation.metric_charts import ChartSettings, is_smoothed
from ltui.app.state_words import state_words
from ltui.widgets import formats
from ltui.widgets.charts.chart_options import sign_of
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.view_models import Cell, ChartSeries, ChartViewModel, Tone

MAX_RAW = 4
"""Maximum number of runs whose raw values are drawn behind the smoothed curves."""
MAX_NAME = 24
"""Maximum cells of the name of a run or a setting in a table."""
MAX_VALUE = 16
"""Maximum cells of the value of a setting in a table."""
MAX_SETTINGS = 40
"""Maximum number of settings that are columns of the table of runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewSettings:
    """What the keys of the screen change."""

    metric: str | None = None
    """The metric of the table, whose chart comes first; None for the first one."""
    chart: ChartSettings = field(default_factory=ChartSettings)
    grouped: bool = False
    band: str = BANDS[0]
    reference: str | None = None
    """Id of the pinned run; None for the first one."""
    hidden: frozenset[str] = frozenset()
    """Keys of runs and groups whose curves are not drawn."""
    opened: frozenset[str] = frozenset()
    """Keys of groups whose members are shown."""
    order: str | None = None
    """Key of the column by which the rows are sorted; None for the order of the runs."""

    def next_band(self) -> str:
        """Return the kind of band that follows."""
        return BANDS[(BANDS.index(self.band) + 1) % len(BANDS)]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table, with its cells by the keys of the columns."""

    key: str
    cells: dict[str, Cells]


@dataclass(frozen=True, slots=True)
class TableView:
    """The columns and rows of a table."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]


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
    return pinned if pinned in comparison.by_id else comparison.runs[0].id


# -- charts ----------------------------------------------------------------------------------------


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
    series.sort(key=lambda one: one.name == pinned)
    return ChartViewModel(
        title=clean_name(metric),
        series=tuple(series),
        # Charts of several metrics have the same legend, so the axis names the metric.
        x_label=f"{clean_name(metric)} by {axis}",
        x_time=axis == "time",
        x_whole=axis == "step",
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
        _series(comparison, run_id, smoothed[run_id].x, smoothed[run_id].y) for run_id in shown
    ]


def _series(
    comparison: Comparison, run_id: str, x: np.ndarray, y: np.ndarray, *, dim: bool = False
) -> ChartSeries:
    return ChartSeries(
        name=clean_name(comparison.names[run_id]),
        x=x,
        y=y,
        colour=comparison.colours[run_id],
        dim=dim,
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
                        name=f"{group.label} ({len(group.runs)})",
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
        parts.append(f"smoothing {weight:g}" if weight else "raw")
    if settings.grouped:
        parts.append(f"mean and {BAND_NAMES[settings.band]}; faint where a member has ended")
    if settings.hidden:
        parts.append(f"{len(settings.hidden)} hidden")
    return " · ".join(parts)


# -- tables ----------------------------------------------------------------------------------------


def runs_table(comparison: Comparison, settings: ViewSettings) -> TableView:
    """Return the table of runs and groups: the chosen metric, speed, and settings that differ."""
    metric = chosen_metric(comparison, settings)
    rows: list[TableRow] = []
    groups = comparison.groups if settings.grouped else []
    for group in groups:
        rows.append(_group_row(comparison, settings, group, metric))
        if group_key(group) in settings.opened:
            rows += [_run_row(comparison, settings, i, metric, indent="  ") for i in group.runs]
    grouped = {run_id for group in groups for run_id in group.runs}
    alone = [
        _run_row(comparison, settings, run.id, metric)
        for run in _ordered(comparison, settings.order, metric)
        if run.id not in grouped
    ]
    rows += alone
    heads = [*_heads(comparison, metric), *_setting_heads(comparison)]
    shown = [head for head in heads if not head.optional or _has_values(rows, head.key)]
    return TableView(tuple(_sized(head, rows, settings.order) for head in shown), tuple(rows))


def _has_values(rows: Sequence[TableRow], key: str) -> bool:
    return any(cell.text != NA for row in rows for cell in row.cells.get(key, ()))


def sort_keys(comparison: Comparison, settings: ViewSettings) -> list[str | None]:
    """Return the keys of the columns by which the rows can be sorted; None is the given order."""
    heads = [*_heads(comparison, chosen_metric(comparison, settings)), *_setting_heads(comparison)]
    return [None, *(head.key for head in heads if head.key not in ("sign", "state"))]


def _heads(comparison: Comparison, metric: str | None) -> list[Column]:
    summaries = [one for run in comparison.runs if (one := run.metrics.get(metric or ""))]
    known = any(summary.direction for summary in summaries)
    return [
        Column(key="sign", title="", width=1),
        Column(key="run", title="run", width=8),
        Column(key="best", title="best" if known else "lowest", width=6, right=True),
        Column(
            key="at", title="at step" if known else "highest", width=7, right=True, importance=3
        ),
        Column(key="final", title="final", width=6, right=True, importance=2),
        Column(key="delta", title="Δ best", width=6, right=True, importance=4),
        Column(key="band", title="band", width=6, importance=3, optional=True),
        Column(key="state", title="state", width=7, importance=5),
        Column(key="time", title="time", width=6, right=True, importance=6),
        Column(key="rate", title="samples/s", width=9, right=True, importance=7),
        Column(key="memory", title="memory", width=8, right=True, importance=8, optional=True),
    ]


def _setting_heads(comparison: Comparison) -> list[Column]:
    return [
        Column(
            key=f"setting {name}",
            title=clean_name(name.rpartition(".")[2])[:MAX_VALUE],
            width=4,
            importance=10 + number,
        )
        for number, name in enumerate(comparison.differing_settings[:MAX_SETTINGS])
    ]


def _sized(head: Column, rows: Sequence[TableRow], order: str | None) -> Column:
    """Return a column that is as wide as its longest text."""
    title = f"{head.title} ▾" if head.key == order else head.title
    widths = [sum(len(cell.text) for cell in row.cells.get(head.key, ())) for row in rows]
    return replace(head, title=title, width=max([len(title), *widths, 1]))


def _run_row(
    comparison: Comparison,
    settings: ViewSettings,
    run_id: str,
    metric: str | None,
    indent: str = "",
) -> TableRow:
    run = comparison.by_id[run_id]
    summary = run.metrics.get(metric or "")
    reference = reference_id(comparison, settings)
    pinned = " ◂ reference" if run_id == reference else ""
    hidden = run_id in settings.hidden
    name = clean_name(comparison.names[run_id])[:MAX_NAME]
    texts = {
        "best": NA,
        "at": NA,
        "final": NA if summary is None else logged_text(summary.final),
        "delta": _delta(comparison, run_id, reference, metric),
        "time": formats.duration(run.time_s),
        "rate": formats.quantity(run.samples_per_s, ""),
        "memory": formats.size(run.peak_memory_bytes),
        **{
            f"setting {key}": clean_line(run.described.get(key, NA), 200)[:MAX_VALUE]
            for key in comparison.differing_settings[:MAX_SETTINGS]
        },
    }
    if summary is not None:
        texts["best"], texts["at"] = best_texts(summary)
    tone = Tone.DIM if hidden else Tone.PLAIN
    return TableRow(
        run_id,
        {
            "sign": _sign(comparison.colours[run_id], hidden),
            "run": (Cell(text=f"{indent}{name}", tone=tone), Cell(text=pinned, tone=Tone.ACCENT)),
            "state": (Cell(text=state_words(run.snapshot), tone=Tone.DIM),),
            **{key: (Cell(text=text, tone=tone),) for key, text in texts.items()},
        },
    )


def _group_row(
    comparison: Comparison, settings: ViewSettings, group: RunGroup, metric: str | None
) -> TableRow:
    key = group_key(group)
    hidden = key in settings.hidden
    fold = "▾" if key in settings.opened else "▸"
    known = any(
        summary.direction
        for run_id in group.runs
        if (summary := comparison.by_id[run_id].metrics.get(metric or ""))
    )
    best = comparison.spread(group, metric or "", "best" if known else "lowest")
    final = comparison.spread(group, metric or "", "final")
    tone = Tone.DIM if hidden else Tone.PLAIN
    name = f"{fold} {group.label} ({len(group.runs)} runs)"
    return TableRow(
        key,
        {
            "sign": _sign(comparison.colours[group.runs[0]], hidden),
            "run": (Cell(text=name[: MAX_NAME + 10], tone=tone),),
            "best": (Cell(text=NA if best is None else formats.metric(best.mean), tone=tone),),
            "band": (Cell(text=_band_text(best), tone=tone),),
            "final": (Cell(text=NA if final is None else formats.metric(final.mean), tone=tone),),
        },
    )


def _band_text(spread: Spread | None) -> str:
    """Return the band of the best values: ``[0.0187, 0.0190]``."""
    if spread is None or spread.count < 2:
        return NA
    return f"[{formats.significant(spread.low)}, {formats.significant(spread.high)}]"


def _sign(colour: int, hidden: bool) -> Cells:
    if hidden:
        return (Cell(text="·", tone=Tone.DIM),)
    return (Cell(text=sign_of(colour), colour=colour),)


def best_texts(summary: MetricSummary) -> tuple[str, str]:
    """Return the best value and its step; the lowest and the highest if none is known as best."""
    if summary.direction is None:
        return logged_text(summary.lowest), logged_text(summary.highest)
    return logged_text(summary.best), step_text(summary.best)


def _delta(comparison: Comparison, run_id: str, reference: str, metric: str | None) -> str:
    """Return the difference of the best value from that of the reference; ``+`` is higher."""
    if run_id == reference or metric is None:
        return ""
    own, other = (_best_of(comparison, one, metric) for one in (run_id, reference))
    if own is None or other is None:
        return NA
    difference = own.value - other.value
    return f"{'+' if difference >= 0 else ''}{formats.significant(difference, 3)}"


def _best_of(comparison: Comparison, run_id: str, metric: str) -> Logged | None:
    summary = comparison.by_id[run_id].metrics.get(metric)
    return None if summary is None else summary.best


def _ordered(
    comparison: Comparison, order: str | None, metric: str | None
) -> Sequence[ComparedRun]:
    """Return the runs by a column of the table; runs without a value come last."""
    if order is None:
        return comparison.runs
    return sorted(comparison.runs, key=lambda run: _sort_key(_sort_value(run, order, metric)))


def _sort_value(run: ComparedRun, order: str, metric: str | None) -> float | str | None:
    """Return the value of a run in a column."""
    if order.startswith("setting "):
        return run.described.get(order.removeprefix("setting "))
    summary = run.metrics.get(metric or "")
    known = summary is not None and summary.direction is not None
    best = None if summary is None else summary.best if known else summary.lowest
    at = None if summary is None or known else summary.highest
    values: dict[str, float | str | None] = {
        "run": run.snapshot.name,
        "best": None if best is None else best.value,
        "delta": None if best is None else best.value,
        "at": best.step if known and best is not None else None if at is None else at.value,
        "final": None if summary is None else summary.final.value,
        "time": run.time_s,
        "rate": run.samples_per_s,
        "memory": run.peak_memory_bytes,
    }
    return values.get(order)


def _sort_key(value: float | str | None) -> tuple[int, float, str]:
    """Return a key that puts numbers before other texts, and missing values last."""
    if value is None:
        return 2, 0.0, ""
    try:
        number = float(value)
    except ValueError:
        return 1, 0.0, str(value)
    return (0, number, "") if math.isfinite(number) else (1, 0.0, str(value))


def settings_table(comparison: Comparison, settings: ViewSettings) -> TableView:
    """Return one row for each setting and one column for each run, differences first."""
    reference = reference_id(comparison, settings)
    heads = [
        Column(key="setting", title="setting", width=8),
        *(
            Column(
                key=run.id,
                title=f"{sign_of(comparison.colours[run.id])} "
                f"{clean_name(comparison.names[run.id])[:MAX_VALUE]}",
                width=6,
                importance=1 if run.id == reference else 2 + number,
            )
            for number, run in enumerate(comparison.runs)
        ),
    ]
    rows = [
        TableRow(name, _setting_cells(comparison, name, reference, different=different))
        for different, names in (
            (True, comparison.differing_settings),
            (False, comparison.equal_settings),
        )
        for name in names
    ]
    return TableView(tuple(_sized(head, rows, None) for head in heads), tuple(rows))


def _setting_cells(
    comparison: Comparison, name: str, reference: str, *, different: bool
) -> dict[str, Cells]:
    """Return the cells of a setting; ``≠`` marks a row whose values differ."""
    wanted = comparison.by_id[reference].described.get(name)
    tone = Tone.PLAIN if different else Tone.DIM
    sign = "≠ " if different else "  "
    return {
        "setting": (Cell(text=f"{sign}{clean_name(name)}"[: MAX_NAME + 10], tone=tone),),
        **{
            run.id: (
                Cell(
                    text=clean_line(run.described.get(name, NA), 200)[: 2 * MAX_VALUE],
                    tone=Tone.WARN if run.described.get(name) != wanted else tone,
                ),
            )
            for run in comparison.runs
        },
    }
