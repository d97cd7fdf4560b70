"""A comparison as text for the terminal, and as JSON with NaN where a run has no value. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

from ltui.app.compare.alignment import BAND_NAMES, align, common_positions
from ltui.app.compare.compared_run import ComparedRun, Logged, MetricSummary
from ltui.app.compare.comparison import Comparison, RunGroup, Spread
from ltui.app.presentation.run_configuration import number_of
from ltui.app.presentation.run_report import columns, truncated
from ltui.app.presentation.snapshot_text import shown_epoch
from ltui.app.presentation.time_view import SIGNS
from ltui.app.state_words import state_word
from ltui.training.json_codec import to_json
from ltui.training.store.curve_reader import FloatArray
from ltui.training.store.recorded_environment import listed
from ltui.widgets import formats
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name

LEAST_WIDTH = 60
"""Minimum width for which the tables are made; a narrower terminal wraps them."""
LEAST_NAME = 10
"""Minimum cells of the name of a run in a table."""
MAX_VALUE_CELLS = 24
"""Maximum cells of a setting in a table with one column per run."""

Table = list[tuple[str, ...]]


def report_lines(comparison: Comparison, width: int) -> list[str]:
    """Return the whole report in lines of at most ``width`` cells (60 or more)."""
    width = max(width, LEAST_WIDTH)
    lines = [*_runs(comparison, width), "", *_time(comparison, width)]
    for metric in comparison.metrics:
        lines += ["", *_metric(comparison, metric, width)]
    lines += ["", *_settings(comparison, width)]
    if names := comparison.differing_variables:
        text = f"environment variables that differ: {listed(list(map(clean_name, names)))}"
        lines += _wrapped(text, width, "")
    if comparison.groups:
        lines += ["", *_groups(comparison, width)]
    return lines


def _runs(comparison: Comparison, width: int) -> list[str]:
    rows: Table = [("run", "state", "step", "time", "samples/s", "memory")]
    for run in comparison.runs:
        rows.append(
            (
                _numbered(comparison, run.id),
                state_word(run.snapshot),
                formats.step(run.snapshot.global_step),
                formats.duration(run.time_s),
                formats.rate(run.samples_per_s, ""),
                formats.size(run.peak_memory_bytes),
            )
        )
    return _table(rows, width)


def _time(comparison: Comparison, width: int) -> list[str]:
    """Return a table with the share of each part of the time, and what of it was training."""
    ledgers = [run.time for run in comparison.runs]
    numbers = (str(number + 1) for number in range(len(ledgers)))
    rows: Table = [("time", *numbers)]
    rows.append(("goodput", *(formats.percent(ledger.goodput) for ledger in ledgers)))
    for part, (_, words) in SIGNS.items():
        shares = [ledger.run.us(part) / max(1, ledger.run.wall_us) for ledger in ledgers]
        if any(shares):
            rows.append((words, *(formats.percent(share) if share else "" for share in shares)))
    return _table(rows, width)


def _numbered(comparison: Comparison, run_id: str) -> str:
    """Return the number and the name of a run; the settings name runs by their numbers."""
    number = [run.id for run in comparison.runs].index(run_id) + 1
    digits = len(str(len(comparison.runs)))
    return f"{number:>{digits}} {clean_name(comparison.names[run_id])}"


def _metric(comparison: Comparison, metric: str, width: int) -> list[str]:
    summaries = {run.id: run.metrics[metric] for run in comparison.runs if metric in run.metrics}
    direction = comparison.direction(metric)
    better = {"min": " (lower is better)", "max": " (higher is better)"}.get(direction or "", "")
    position = comparison.last_common(metric) if len(summaries) > 1 else None
    common = {} if position is None else comparison.values_at(metric, position)
    heads = ("best", "at step") if direction else ("lowest", "highest")
    rows: Table = [
        ("run", "final", *heads, *([position_text(comparison, position)] * bool(common)))
    ]
    rows += [
        (
            _numbered(comparison, run_id),
            logged_text(one.final),
            *best_texts(one, is_known=direction is not None),
            *([formats.metric(common.get(run_id))] * bool(common)),
        )
        for run_id, one in summaries.items()
    ]
    lines = [f"{truncated(clean_name(metric), width - len(better))}{better}"]
    lines += [f"  {line}" for line in _table(rows, width - 2)]
    missing = [run.id for run in comparison.runs if run.id not in summaries]
    if missing:
        lines += _wrapped(f"not logged by {_run_numbers(comparison, missing)}", width, "  ")
    return lines


def best_texts(summary: MetricSummary, *, is_known: bool) -> tuple[str, str]:
    """Return the best value and its step; the lowest and the highest value if it is not known
    which values of the metric are better."""
    if not is_known:
        return logged_text(summary.lowest), logged_text(summary.highest)
    return logged_text(summary.best), step_text(summary.best)


def logged_text(logged: Logged | None) -> str:
    """Return the value as text."""
    return NA if logged is None else formats.metric(logged.value)


def step_text(logged: Logged | None) -> str:
    """Return the step of a value; ``~4128`` if it is only known to be near that step."""
    if logged is None:
        return NA
    return f"{'' if logged.step_is_exact else '~'}{formats.step(logged.step)}"


def position_text(comparison: Comparison, position: float | None) -> str:
    """Return ``at step 1204``, ``at epoch 2.5`` or ``at 12 m 08 s``."""
    if comparison.axis == "time":
        return f"at {formats.duration(position)}"
    if comparison.axis == "epoch":
        return f"at epoch {formats.significant(position, 3)}"
    return f"at step {formats.step(position)}"


def _settings(comparison: Comparison, width: int) -> list[str]:
    names = comparison.differing_settings
    same = len(comparison.equal_settings)
    if not names:
        return [f"settings: all {same} are the same" if same else "settings: none are known"]
    head = f"settings that differ ({len(names)}; {same} are the same)"
    rows: Table = [("", *(str(n + 1) for n in range(len(comparison.runs))))]
    rows += [
        (
            clean_name(name),
            *(
                truncated(clean_line(run.described.get(name, NA), 200), MAX_VALUE_CELLS)
                for run in comparison.runs
            ),
        )
        for name in names
    ]
    lines = columns(rows)
    if max(map(cell_len, lines)) <= width - 2:
        return [head, *(f"  {line}" for line in lines)]
    return [head, *(line for name in names for line in _setting(comparison, name, width))]


def _setting(comparison: Comparison, name: str, width: int) -> list[str]:
    """Return the values of a setting, each with the numbers of its runs."""
    runs_of: dict[str, list[str]] = {}
    for run in comparison.runs:
        runs_of.setdefault(run.described.get(name, NA), []).append(run.id)
    parts = [
        f"{clean_line(value, 200)} ({_run_numbers(comparison, runs)})"
        for value, runs in runs_of.items()
    ]
    return [
        *_wrapped(clean_name(name), width, "  "),
        *(line for part in parts for line in _wrapped(part, width, "    ")),
    ]


def _run_numbers(comparison: Comparison, run_ids: Sequence[str]) -> str:
    """Return ``run 2``, ``runs 1-3, 5``."""
    ids = [run.id for run in comparison.runs]
    numbers = tuple(ids.index(run_id) + 1 for run_id in run_ids)
    return f"{'run' if len(numbers) == 1 else 'runs'} {formats.ranks(numbers, limit=40)}"


def _groups(comparison: Comparison, width: int) -> list[str]:
    lines = [f"groups (mean and {BAND_NAMES[comparison.band]})"]
    for group in comparison.groups:
        text = f"{group.label}: {_run_numbers(comparison, group.runs)}"
        lines += _wrapped(text, width, "  ")
        rows: Table = [("", "final", "best")]
        rows += [
            (
                clean_name(metric),
                spread_text(comparison.spread(group, metric, "final"), comparison.band),
                spread_text(comparison.spread(group, metric, "best"), comparison.band),
            )
            for metric in comparison.metrics
            if comparison.spread(group, metric, "final") is not None
        ]
        lines += [f"    {line}" for line in _table(rows, width - 4)]
    return lines


def spread_text(spread: Spread | None, band: str) -> str:
    """Return ``0.3120 [0.3001, 0.3240]``, or ``0.3120 ± 0.0120`` of a deviation or an error; with
    the number of runs if it is only one."""
    if spread is None:
        return NA
    if spread.runs < 2:
        return f"{formats.metric(spread.mean)} (1 run)"
    if BAND_NAMES[band].startswith("±"):
        return f"{formats.metric(spread.mean)} ± {formats.metric(spread.high - spread.mean)}"
    bounds = f"[{formats.metric(spread.low)}, {formats.metric(spread.high)}]"
    return f"{formats.metric(spread.mean)} {bounds}"


def _table(rows: Table, width: int) -> list[str]:
    """Return aligned rows; the first column is cut, and then columns are left out, to fit."""
    while True:
        others = sum(max(cell_len(row[i]) for row in rows) + 2 for i in range(1, len(rows[0])))
        names = max(cell_len(row[0]) for row in rows)
        if others + min(names, LEAST_NAME) <= width or len(rows[0]) <= 2:
            break
        rows = [row[:-1] for row in rows]
    room = max(LEAST_NAME, width - others)
    cut = [(truncated(row[0], room), *row[1:]) for row in rows]
    return columns(cut, frozenset(range(1 if rows[0][1] == "final" else 2, len(rows[0]))))


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


# As JSON --------------------------------------------------------------------------------------


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain JSON values; ``NaN`` and infinities are texts."""
    document = {
        "by": comparison.axis,
        "band": comparison.band,
        "metrics": list(comparison.metrics),
        "runs": [_run_json(run) for run in comparison.runs],
        "settings": {
            name: {run.id: run.described.get(name) for run in comparison.runs}
            for name in comparison.differing_settings
        },
        "equal_settings": {
            name: comparison.runs[0].described[name] for name in comparison.equal_settings
        },
        "differing_variables": comparison.differing_variables,
        "parameters": [_parameters(comparison, run) for run in comparison.runs],
        "curves": {metric: _curves(comparison, metric) for metric in comparison.metrics},
        "groups": [_group_json(comparison, group) for group in comparison.groups],
    }
    plain: dict[str, Any] = to_json(document)
    return plain


def _run_json(run: ComparedRun) -> dict[str, Any]:
    snapshot = run.snapshot
    return {
        "id": run.id,
        "name": snapshot.name,
        "state": snapshot.state.value,
        "state_word": state_word(snapshot),
        "step": snapshot.global_step,
        "epoch": shown_epoch(snapshot),
        "time_s": run.time_s,
        "samples_per_s": run.samples_per_s,
        "peak_memory_bytes": run.peak_memory_bytes,
        "goodput": run.time.goodput,
        "time_us": run.time.run.parts_us,
        "metrics": {name: _metric_json(one) for name, one in run.metrics.items()},
    }


def _parameters(comparison: Comparison, run: ComparedRun) -> dict[str, Any]:
    """Return a row of the table of settings that differ beside the metrics; numbers as numbers."""
    texts = {name: run.settings.get(name) for name in comparison.parameters}
    numbers = {name: number_of(text) for name, text in texts.items()}
    best = {name: comparison.best_of(run, name) for name in run.metrics}
    return {
        "run": run.id,
        "settings": {
            name: text if numbers[name] is None else numbers[name] for name, text in texts.items()
        },
        "final": {name: summary.final.value for name, summary in run.metrics.items()},
        "best": {
            name: None if logged is None else logged.value
            for name, logged in best.items()
            if comparison.direction(name) is not None
        },
    }


def _metric_json(summary: MetricSummary) -> dict[str, Any]:
    return {
        "direction": summary.direction,
        "final": summary.final,
        "best": summary.best,
        "min": summary.lowest,
        "max": summary.highest,
    }


def _curves(comparison: Comparison, metric: str) -> dict[str, Any]:
    """Return the values of all runs at their common positions."""
    lines = comparison.lines(metric)
    positions = common_positions(list(lines.values()))
    table = align(list(lines.values()), positions)
    return {
        "x": positions.tolist(),
        "runs": {run_id: _values(row) for run_id, row in zip(lines, table, strict=True)},
    }


def _group_json(comparison: Comparison, group: RunGroup) -> dict[str, Any]:
    return {
        "label": group.label,
        "runs": list(group.runs),
        "metrics": {
            metric: {
                "final": comparison.spread(group, metric, "final"),
                "best": comparison.spread(group, metric, "best"),
                "curve": _band(comparison, group, metric),
            }
            for metric in comparison.metrics
        },
    }


def _band(comparison: Comparison, group: RunGroup, metric: str) -> dict[str, Any] | None:
    curve = comparison.group_curve(group, metric)
    if curve is None:
        return None
    positions, band = curve
    return {
        "x": positions.tolist(),
        "mean": _values(band.mean),
        "low": _values(band.low),
        "high": _values(band.high),
        "runs": [int(count) for count in band.count],
    }


def _values(values: FloatArray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
