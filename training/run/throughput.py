"""How fast a run trains now: pure arithmetic over the fold's windows.

A figure is over the last ten seconds of batches, or the last four batches where they are slower
than that. Once the next batch is overdue, the waiting time counts too, so the figure falls while
nothing moves; after a whole window without a batch it is ``None``: not known, never frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from ltui.training.run.fold import Fold, Mark, RankFold
from ltui.training.run.snapshot import Throughput

WINDOW_S = 10.0
_STEPS_IN_WINDOW = 4
_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Batches of one rank between ``begin`` and ``end``, which lasted ``seconds``."""

    begin: Mark
    end: Mark
    seconds: float

    @property
    def samples_per_s(self) -> float:
        return (self.end.samples - self.begin.samples) / self.seconds

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps a second."""
        return max(0.0, self.end.global_step - self.begin.global_step) / self.seconds

    def share(self, part: str) -> float | None:
        """Share (0 to 1) of the step spent in ``fetch``, ``forward``, ``backward``, ..."""
        timed = self.end.timed_s - self.begin.timed_s
        if timed <= 0:
            return None
        spent: float = getattr(self.end, f"{part}_s") - getattr(self.begin, f"{part}_s")
        return min(1.0, max(0.0, spent / timed))


def usual_step_s(rank: RankFold) -> float | None:
    """Median seconds of the rank's recent steps."""
    return median(rank.recent_step_s) if rank.recent_step_s else None


def window(rank: RankFold, now_ns: int) -> Window | None:
    """The rank's present window; None where it did not move for a whole one, or hardly yet."""
    end = rank.total
    if end is None:
        return None
    usual = usual_step_s(rank) or 0.0
    span_s = max(WINDOW_S, _STEPS_IN_WINDOW * usual)
    idle_s = (now_ns - end.t_ns) / 1e9
    if idle_s > span_s:
        return None
    overdue = idle_s > max(_GRACE_S, 2 * usual)
    end_ns = now_ns if overdue else end.t_ns
    begin = next((m for m in rank.marks if end_ns - m.t_ns <= span_s * 1e9), None)
    if begin is None or begin.t_ns >= end.t_ns:
        return None
    return Window(begin=begin, end=end, seconds=(end_ns - begin.t_ns) / 1e9)


def throughput(fold: Fold, now_ns: int) -> Throughput:
    """Of the whole run: rates summed over the ranks, shares averaged over them."""
    found = {r: w for r, f in fold.ranks.items() if (w := window(f, now_ns)) is not None}
    if not found:
        return Throughput(best_samples_per_s=fold.best_samples_per_s)
    total = sum(w.samples_per_s for w in found.values())
    fetch = _mean_share(found.values(), "fetch")
    return Throughput(
        samples_per_s=total,
        best_samples_per_s=fold.best_samples_per_s,
        steps_per_s=found[min(found)].steps_per_s,
        data_wait_share=fetch,
        fetch_share=fetch,
        forward_share=_mean_share(found.values(), "forward"),
        backward_share=_mean_share(found.values(), "backward"),
        optimizer_share=_mean_share(found.values(), "optimizer"),
    )


def _mean_share(windows: Iterable[Window], part: str) -> float | None:
    shares = [s for w in windows if (s := w.share(part)) is not None]
    return fmean(shares) if shares else None
