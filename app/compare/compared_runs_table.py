"""The table of the compared runs and groups: a metric, speed, and settings that differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison, Spread
from ltui.app.compare.comparison_report import logged_text, step_text
from ltui.app.compare.metric_summary import Logged, MetricSummary
from ltui.app.compare.run_groups import RunGroup
from ltui.app.compare.table_view import MAX_NAME, MAX_VALUE, TableRow, TableView, sized
from ltui.app.compare.view_settings import (
    ViewSettings,
    chosen_metric,
    group_key,
    reference_id,
)
from ltui.app.state_words import state_words
from ltui.widgets import formats
from ltui.widgets.charts.chart_options import sign_of
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.view_models import Cell, Tone

MAX_SETTINGS = 40
"""Maximum number of settings that are columns of the table of runs."""


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
    return TableView(tuple(sized(head, rows, settings.order) for head in shown), tuple(rows))


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
