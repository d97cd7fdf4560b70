"""Read curves and GPU readings from a run's store in the form that the charts need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ltui.app.live.curve_arithmetic import concatenate, splice, sum_curves, throughput_curve
from ltui.app.live.gpu_history import HISTORY_S, GpuSample
from ltui.app.live.metric_history import MAX_RANK_CURVES
from ltui.training.store.curve_reader import Curve
from ltui.training.store.history_reader import RunStore

TAIL_STEPS = 2048
"""Number of steps at the end of a curve that are read one by one. The end of the smoothed curve
is then the same as if all steps were read."""


def stored_curve(store: RunStore, name: str) -> Curve:
    """Return a whole curve of rank 0, with its end at full resolution."""
    curve = store.curve(name)
    if not len(curve) or float(curve.count.max()) <= 1:
        return curve
    first = int(curve.steps[-1]) - TAIL_STEPS
    return splice(curve, store.curve(name, first_step=first, max_points=4 * TAIL_STEPS))


def stored_segment(store: RunStore, name: str, steps: tuple[int, int]) -> Curve:
    """Return the part of a curve between two steps, in as much detail as the store has."""
    return store.curve(name, first_step=steps[0], last_step=steps[1])


def stored_gpu_samples(store: RunStore, number: int) -> list[GpuSample]:
    """Return the readings of a GPU in the last minutes, oldest first."""
    history = store.gpu_history(number, HISTORY_S)
    columns = (
        history.times,
        history.utilisation_percent / 100,
        history.memory_used_bytes,
        history.power_w,
        history.temperature_c,
    )
    return [GpuSample(*row) for row in np.transpose(columns).tolist()]


def stored_rates(store: RunStore, steps: tuple[int, int] | None = None) -> dict[int | None, Curve]:
    """Return the throughput in total (key None) and per rank, between two steps or of the whole
    run.

    Each attempt is computed with its own ranks, because a run may be resumed on another number of
    ranks.
    """
    parts: dict[int | None, list[Curve]] = {}
    for attempt, ranks in store.attempt_ranks().items():
        for rank, curve in _attempt_rates(store, attempt, ranks, steps).items():
            if len(curve):
                parts.setdefault(rank, []).append(curve)
    return {rank: concatenate(curves) for rank, curves in parts.items()}


def _attempt_rates(
    store: RunStore, attempt: int, ranks: tuple[int, ...], steps: tuple[int, int] | None
) -> dict[int | None, Curve]:
    first, last = steps or (None, None)

    def read_pair(rank: int | None) -> tuple[Curve, Curve]:
        samples, seconds = (
            store.curve(name, rank=rank, attempt=attempt, first_step=first, last_step=last)
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
    rates: dict[int | None, Curve] = {rank: throughput_curve(*read_pair(rank)) for rank in ranks}
    rates = {rank: curve for rank, curve in rates.items() if len(curve)}
    return {None: sum_curves(list(rates.values())), **rates} if rates else {}


def stored_attempt_ranks(store: RunStore) -> tuple[tuple[int, int], ...]:
    """Return first step and number of ranks of each attempt whose steps count."""
    first_steps = {attempt.number: attempt.resumed_step or 0 for attempt in store.attempts()}
    return tuple(
        (first_steps.get(attempt, 0), len(ranks))
        for attempt, ranks in store.attempt_ranks().items()
        if ranks
    )
