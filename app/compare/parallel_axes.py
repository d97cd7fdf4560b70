"""The settings that differ and a metric as parallel coordinates: one axis each. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison
from ltui.app.compare.view_settings import ViewSettings, chosen_metric, shown_runs
from ltui.app.runs.run_settings import number_of
from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import AxisRange, linear_ticks, log_ticks
from ltui.widgets.charts.parallel_plot import ParallelAxis, ParallelLine, ParallelViewModel
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name

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
