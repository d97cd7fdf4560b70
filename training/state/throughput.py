"""Current speed of a run, computed from the fold's windows. Pure.

Throughput is the number of samples of training steps divided by the time of these steps. A step
lasts from the end of the previous batch to the end of its own batch, so waiting for data counts.
Validation, checkpoints and pauses are between steps and do not count. A figure covers the last
``WINDOW_S`` seconds of steps, or the last few batches if they are slower than that. The throughput
of a run is the sum over its ranks. Charts, tables and the command line all show this figure; the
best throughput is its highest value so far. The supervisor stores this figure as the metric
``THROUGHPUT``, which is what charts draw.

A figure is a measurement and does not decay: it does not change until the next batch ends. After
``WINDOW_S`` seconds (or four median steps) without a batch it is ``None``, which means unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import fmean, median

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.state.metric_name_patterns import MAX_RANK_RATES, TOTAL_RANK
from ltui.training.state.record_fold import WINDOW_S, FoldState, RankFold, Window, window_before
from ltui.training.state.run_snapshot import Throughput

POINT_INTERVAL_S = 0.5
"""Seconds of step time between two stored points."""
_STEPS_IN_WINDOW = 4
"""Median steps without a batch after which a window is out of date, if that is longer."""


def median_step_s(rank: RankFold) -> float | None:
    """Return the median duration of the rank's recent steps in seconds."""
    return median(rank.recent_step_s) if rank.recent_step_s else None


def mean_batch_s(rank: RankFold) -> float | None:
    """Return the mean duration of the rank's last batches in seconds, however long ago they ended.

    Unlike a median it holds if batches differ: with accumulated gradients, or if the host runs
    ahead of its GPU and waits for it now and then.
    """
    window = None if rank.totals is None else window_before(rank.recent_totals, rank.totals)
    return None if window is None else window.seconds / window.batches


def current_window(rank: RankFold, now_ns: int) -> Window | None:
    """Return the rank's current window.

    Return None if no batch has ended for a whole window, or if there are too few batches.
    """
    end = rank.totals
    if end is None:
        return None
    idle_s = (now_ns - end.t_ns) / 1e9
    if idle_s > max(WINDOW_S, _STEPS_IN_WINDOW * (median_step_s(rank) or 0.0)):
        return None
    return window_before(rank.recent_totals, end)


def throughput(fold: FoldState, now_ns: int) -> Throughput:
    """Return the throughput of the run: rates are sums and fractions are means over the ranks."""
    windows = {r: w for r, f in fold.ranks.items() if (w := current_window(f, now_ns)) is not None}
    if not windows:
        return Throughput(best_samples_per_s=fold.best_samples_per_s)
    rates = [rate for w in windows.values() if (rate := w.samples_per_s) is not None]
    fetch_fraction = _mean_fraction(fold, windows, "fetch")
    return Throughput(
        samples_per_s=sum(rates) if rates else None,
        best_samples_per_s=fold.best_samples_per_s,
        steps_per_s=windows[min(windows)].steps_per_s,
        data_wait_share=fetch_fraction,
        fetch_share=fetch_fraction,
        forward_share=_mean_fraction(fold, windows, "forward"),
        backward_share=_mean_fraction(fold, windows, "backward"),
        optimizer_share=_mean_fraction(fold, windows, "optimizer"),
    )


class ThroughputPoint(Struct, frozen=True):
    """The throughput at the end of a step."""

    timed_s: float
    """Step time of the lowest rank until then, in seconds."""
    t_ns: int
    step: int
    epoch: int | None
    wall_s: float
    rates: Mapping[int, float]
    """Samples per second of the run (``TOTAL_RANK``) and of each rank, if there are few."""


def next_point(
    fold: FoldState, ranks: Collection[int], previous: ThroughputPoint | None
) -> ThroughputPoint | None:
    """Return the point after ``previous`` if it is due and every rank has a rate.

    So the total is never that of some of the ranks.
    """
    lead = fold.lowest_active_rank
    if lead is None or lead.totals is None or lead.wall_s is None:
        return None
    timed_s = lead.totals.timed_s
    if previous is not None and 0 <= timed_s - previous.timed_s < POINT_INTERVAL_S:
        return None
    rates = {
        rank: folded.samples_per_s
        for rank in ranks
        if (folded := fold.ranks.get(rank)) and folded.samples_per_s is not None
    }
    if not rates or len(rates) < len(ranks):
        return None
    total = {TOTAL_RANK: sum(rates.values())}
    shown = {**total, **rates} if 1 < len(rates) <= MAX_RANK_RATES else total
    step, t_ns = lead.global_step or 0, lead.totals.t_ns
    return ThroughputPoint(timed_s, t_ns, step, lead.epoch, lead.wall_s, shown)


def without_current_rates(current: Throughput) -> Throughput:
    """Return the throughput of a run that is paused or stalled: its current rates are unknown."""
    return replace(current, samples_per_s=None, steps_per_s=None)


def _mean_fraction(fold: FoldState, windows: Mapping[int, Window], part: str) -> float | None:
    """Return the mean over the ranks that measure this part of a step; None if none does."""
    known = [w.fraction(part) for rank, w in windows.items() if fold.ranks[rank].knows(part)]
    return fmean(known) if known else None
