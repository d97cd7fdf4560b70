"""How fast a run trains now: pure arithmetic over the fold's windows.

Throughput is samples of training steps divided by the time of these steps. A step lasts from the
end of the batch before to the end of its own batch, so waiting for data counts. Validation,
checkpoints and pauses lie between steps and do not count. A figure covers the last
``WINDOW_S`` seconds of steps, or the last few batches where they are slower than that. The figure
of a run is the sum over its ranks. The chart, its border, the ranks' column and the command line
all show this figure; the best one is the highest that it ever was.

A figure is a measurement and does not decay: while no batch ends it stays as it is, and after
``WINDOW_S`` seconds (or four usual steps) without a batch it is ``None``, not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median

from ltui.training.state.record_fold import (
    WINDOW_S,
    FoldState,
    RankFold,
    RunningTotals,
    window_start,
)
from ltui.training.state.run_snapshot import Throughput

_STEPS_IN_WINDOW = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Batches of one rank between ``begin`` and ``end``, whose steps took ``seconds``."""

    begin: RunningTotals
    end: RunningTotals
    seconds: float

    @property
    def samples_per_s(self) -> float | None:
        """None where the batches' sizes are not known."""
        samples = self.end.samples - self.begin.samples
        return samples / self.seconds if samples > 0 else None

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps a second."""
        return max(0.0, self.end.global_step - self.begin.global_step) / self.seconds

    def share(self, part: str) -> float:
        """Share (0 to 1) of the step spent in ``fetch``, ``forward``, ``backward``, ..."""
        spent: float = getattr(self.end, f"{part}_s") - getattr(self.begin, f"{part}_s")
        return min(1.0, max(0.0, spent / self.seconds))


def median_step_s(rank: RankFold) -> float | None:
    """Median seconds of the rank's recent steps."""
    return median(rank.recent_step_s) if rank.recent_step_s else None


def current_window(rank: RankFold, now_ns: int) -> Window | None:
    """The rank's present window; None where it did not move for a whole one, or hardly yet."""
    end = rank.totals
    if end is None:
        return None
    idle_s = (now_ns - end.t_ns) / 1e9
    if idle_s > max(WINDOW_S, _STEPS_IN_WINDOW * (median_step_s(rank) or 0.0)):
        return None
    begin = window_start(rank.recent_totals, end)
    if begin is None:
        return None
    return Window(begin=begin, end=end, seconds=end.timed_s - begin.timed_s)


def throughput(fold: FoldState, now_ns: int) -> Throughput:
    """Of the whole run: rates summed over the ranks, shares averaged over them."""
    found = {r: w for r, f in fold.ranks.items() if (w := current_window(f, now_ns)) is not None}
    if not found:
        return Throughput(best_samples_per_s=fold.best_samples_per_s)
    rates = [rate for w in found.values() if (rate := w.samples_per_s) is not None]
    fetch = _mean_share(found.values(), "fetch")
    return Throughput(
        samples_per_s=sum(rates) if rates else None,
        best_samples_per_s=fold.best_samples_per_s,
        steps_per_s=found[min(found)].steps_per_s,
        data_wait_share=fetch,
        fetch_share=fetch,
        forward_share=_mean_share(found.values(), "forward"),
        backward_share=_mean_share(found.values(), "backward"),
        optimizer_share=_mean_share(found.values(), "optimizer"),
    )


def without_current_rates(moving: Throughput) -> Throughput:
    """``moving`` of a run that is paused or stalled now: its present rates are not known."""
    return replace(moving, samples_per_s=None, steps_per_s=None)


def _mean_share(windows: Iterable[Window], part: str) -> float:
    return fmean(w.share(part) for w in windows)
