"""A comparison as one JSON document. Pure."""

from __future__ import annotations

import math
from typing import Any

from ltui.app.compare.alignment import align, common_positions
from ltui.app.compare.compared_run import ComparedRun, MetricSummary
from ltui.app.compare.comparison import Comparison, RunGroup
from ltui.app.presentation.snapshot_text import shown_epoch
from ltui.app.runs.run_settings import number_of
from ltui.app.state_words import state_word
from ltui.training.json_codec import to_json
from ltui.training.store.curve_reader import FloatArray


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain JSON values; ``NaN`` and infinities are texts."""
    document = {
        "by": comparison.axis,
        "band": comparison.band,
        "metrics": list(comparison.metrics),
        "runs": [_run(run) for run in comparison.runs],
        "settings": {
            name: {run.id: run.described.get(name) for run in comparison.runs}
            for name in comparison.differing_settings
        },
        "equal_settings": {
            name: comparison.runs[0].described[name] for name in comparison.equal_settings
        },
        "parameters": [_parameters(comparison, run) for run in comparison.runs],
        "curves": {metric: _curves(comparison, metric) for metric in comparison.metrics},
        "groups": [_group(comparison, group) for group in comparison.groups],
    }
    plain: dict[str, Any] = to_json(document)
    return plain


def _run(run: ComparedRun) -> dict[str, Any]:
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
        "metrics": {name: _metric(one) for name, one in run.metrics.items()},
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


def _metric(summary: MetricSummary) -> dict[str, Any]:
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


def _group(comparison: Comparison, group: RunGroup) -> dict[str, Any]:
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
