"""Read curves from a run's store in the form that the charts need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ltui.app.live.curve_arithmetic import (
    COLUMNS,
    concatenate,
    splice,
    sum_curves,
    throughput_curve,
)
from ltui.app.live.frame import CurveData
from ltui.app.live.metric_history import MAX_RANK_CURVES
from ltui.training.store.history_reader import RunStore

CURVE_POINTS = 2000
"""Maximum number of points of a whole curve, and of a part shown in detail."""
TAIL_STEPS = 2048
"""Number of steps at the end of a curve that are read one by one. The end of the smoothed curve
is then the same as if all steps were read."""


def stored_curve(
    store: RunStore, name: str, *, rank: int | None = 0, attempt: int | None = None
) -> CurveData:
    """Return a whole curve, with its end at full resolution."""
    curve = _read_curve(store, name, rank=rank, attempt=attempt)
    if not len(curve) or float(curve.count.max()) <= 1:
        return curve
    first = int(curve.steps[-1]) - TAIL_STEPS
    tail = _read_curve(
        store, name, rank=rank, attempt=attempt, first_step=first, points=4 * TAIL_STEPS
    )
    return splice(curve, tail)


def stored_segment(store: RunStore, name: str, steps: tuple[int, int]) -> CurveData:
    """Return the part of a curve between two steps, in as much detail as the store has."""
    return _read_curve(store, name, first_step=steps[0], last_step=steps[1])


def stored_rates(
    store: RunStore, steps: tuple[int, int] | None = None
) -> dict[int | None, CurveData]:
    """Return the throughput in total (key None) and per rank, between two steps or of the whole
    run.

    Each attempt is computed with its own ranks, because a run may be resumed on another number of
    ranks.
    """
    parts: dict[int | None, list[CurveData]] = {}
    for attempt, ranks in store.attempt_ranks().items():
        for rank, curve in _attempt_rates(store, attempt, ranks, steps).items():
            if len(curve):
                parts.setdefault(rank, []).append(curve)
    return {rank: concatenate(curves) for rank, curves in parts.items()}


def _attempt_rates(
    store: RunStore, attempt: int, ranks: tuple[int, ...], steps: tuple[int, int] | None
) -> dict[int | None, CurveData]:
    first, last = steps or (None, None)

    def read_pair(rank: int | None) -> tuple[CurveData, CurveData]:
        samples, seconds = (
            _read_curve(store, name, rank=rank, attempt=attempt, first_step=first, last_step=last)
            for name in ("step/samples", "step/seconds")
        )
        return samples, seconds

    if not ranks:
        return {}
    if len(ranks) > MAX_RANK_CURVES:
        samples, seconds = read_pair(None)
        # A point counts the steps of all ranks, but only the time of one of them passed.
        curve = throughput_curve(samples, replace(seconds, count=seconds.count / len(ranks)))
        total = curve.mean * len(ranks)
        return {None: replace(curve, mean=total, low=total, high=total)}
    rates: dict[int | None, CurveData] = {
        rank: throughput_curve(*read_pair(rank)) for rank in ranks
    }
    rates = {rank: curve for rank, curve in rates.items() if len(curve)}
    return {None: sum_curves(list(rates.values())), **rates} if rates else {}


def _read_curve(
    store: RunStore,
    name: str,
    *,
    rank: int | None = 0,
    attempt: int | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
    points: int = CURVE_POINTS,
) -> CurveData:
    curve = store.curve(
        name,
        max_points=points,
        rank=rank,
        first_step=first_step,
        last_step=last_step,
        attempt=attempt,
    )
    return CurveData(**{column: np.asarray(getattr(curve, column)) for column in COLUMNS})
