"""Measures what limits the speed of an attempt, once a second over the last half minute.

It reads what is there: totals of steps, pulses, the heartbeat table, and readings of the GPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from ltui.training.diagnosis.limits import RankLoad, RunLoad, find_limit, slowest_first
from ltui.training.shared.record_types import Phase, PulseState
from ltui.training.state.record_fold import FoldState, RunningTotals
from ltui.training.state.run_snapshot import GpuSnapshot, Limit
from ltui.training.tensor_queue.heartbeat_table import HeartbeatTable, RankActivity

WINDOW_S = 30.0
SHORTEST_S = 8.0
"""Seconds of a window below which nothing is said."""
PERIOD_S = 1.0
_NO_ACTIVITY = RankActivity(0, 0, 0, 0, 0)


class _Sample(Struct):
    """Counts since the begin of the attempt, at one time."""

    at_s: float
    ticks: int
    validating: int
    saving: int
    totals: Mapping[int, RunningTotals]
    activity: Mapping[int, RankActivity]
    gpus: Mapping[int, float] = field(default_factory=dict)
    """Rank -> utilisation of its GPUs now, in percent."""


class LimitMeter:
    """The measurement of one attempt. Used by the supervisor's loop."""

    def __init__(self, queue_dir: Path) -> None:
        self._table = HeartbeatTable(queue_dir)
        self._samples: deque[_Sample] = deque()
        self._rested: set[tuple[int, float]] = set()
        """Ranks that have done no batch since the time without training, and their batches: the
        next one of each contains that time."""
        self._ticks = self._validating = self._saving = 0
        self._seconds: dict[tuple[str, int | None], float] = {}
        """Kind and rank of a limit -> seconds for which it was the limit."""
        self._last: dict[tuple[str, int | None], Limit] = {}
        self.limit: Limit | None = None
        """What limits the speed now; None if too little was measured."""

    def update(
        self,
        now_s: float,
        trains: bool,
        pulses: Mapping[int, PulseState | None],
        fold: FoldState,
        gpus: Sequence[GpuSnapshot],
        others: Mapping[int, RankActivity] | None = None,
    ) -> None:
        """Take the present state into account.

        ``now_s`` is monotonic time. ``trains``: the run is neither paused nor stalled.
        ``gpus`` are those of all machines, the own ones first; ``others`` are the counts of the
        ranks on other machines.
        """
        if not trains:
            self._rested = _batches(fold)
        elif self._rested:
            self._rested &= _batches(fold)
        if not trains or self._rested:
            self._samples.clear()
            self.limit = None
            return
        phases = {pulse.phase for pulse in pulses.values() if pulse is not None}
        self._ticks += 1
        self._validating += Phase.VALIDATION in phases
        self._saving += Phase.CHECKPOINT in phases and Phase.VALIDATION not in phases
        if self._samples and now_s - self._samples[-1].at_s < PERIOD_S:
            return
        totals = {r: f.totals for r, f in fold.ranks.items() if f.totals is not None}
        busy: dict[int, float] = {}
        for gpu in gpus:
            percent = gpu.utilisation_percent
            if percent is not None and 0 <= percent <= 100:
                busy.update((rank, percent) for rank in gpu.ranks if rank not in busy)
        activity = {**(others or {}), **self.activity()}
        counts = (self._ticks, self._validating, self._saving)
        self._samples.append(_Sample(now_s, *counts, totals, activity, busy))
        while now_s - self._samples[0].at_s > WINDOW_S:
            self._samples.popleft()
        first = self._samples[0]
        self.limit = None
        if now_s - first.at_s >= SHORTEST_S:
            self.limit = find_limit(_load_of(list(self._samples), fold))
        if self.limit is not None:
            key = self.limit.kind, self.limit.rank
            self._seconds[key] = self._seconds.get(key, 0.0) + PERIOD_S
            self._last[key] = self.limit

    def activity(self) -> dict[int, RankActivity]:
        """Return what the heartbeat threads of the ranks on this machine have counted."""
        return {r: counts for r, counts in self._table.read_activity().items() if any(counts)}

    def slowest_first(self, fold: FoldState) -> list[int]:
        """Return all ranks, that for which the others wait first, then by the last half minute."""
        named = None if self.limit is None else self.limit.rank
        return slowest_first(self.loads(fold), sorted(fold.ranks), named)

    def loads(self, fold: FoldState) -> tuple[RankLoad, ...]:
        """Return what each rank did in the last half minute."""
        return _load_of(list(self._samples), fold).ranks if self._samples else ()

    def overall(self) -> Limit | None:
        """Return what limited the attempt for the longest time."""
        longest = max(self._seconds, key=lambda key: self._seconds[key], default=None)
        return None if longest is None else self._last[longest]


def _batches(fold: FoldState) -> set[tuple[int, float]]:
    """Return the ranks with the number of batches that each has done."""
    return {(r, f.totals.batches) for r, f in fold.ranks.items() if f.totals is not None}


def _load_of(samples: Sequence[_Sample], fold: FoldState) -> RunLoad:
    first, last = samples[0], samples[-1]
    ticks = max(1, last.ticks - first.ticks)
    return RunLoad(
        seconds=last.at_s - first.at_s,
        validation=(last.validating - first.validating) / ticks,
        checkpoints=(last.saving - first.saving) / ticks,
        ranks=tuple(_rank_load(rank, samples, fold) for rank in sorted(last.totals)),
    )


def _rank_load(rank: int, samples: Sequence[_Sample], fold: FoldState) -> RankLoad:
    first, last, folded = samples[0], samples[-1], fold.ranks[rank]
    end = last.totals[rank]
    start = first.totals.get(rank) or RunningTotals(0, *(0.0,) * 9)
    own_s = (
        end.fetch_s - start.fetch_s + end.forward_s - start.forward_s
        + end.optimizer_s - start.optimizer_s
    )  # fmt: skip
    # The counts of another machine come with its reports, so the first samples may lack them.
    known = [s.activity[rank] for s in samples if rank in s.activity] or [_NO_ACTIVITY]
    then, now = known[0], known[-1]
    # A new process of the rank counts from zero.
    then = then if now.looks >= then.looks and now.beats >= then.beats else _NO_ACTIVITY
    beats, waiting, looks, moved, slept = (
        max(0, after - before) for before, after in zip(then, now, strict=True)
    )
    readings = [sample.gpus[rank] for sample in samples if rank in sample.gpus]
    return RankLoad(
        rank=rank,
        steps=end.batches - start.batches,
        seconds=end.timed_s - start.timed_s,
        fetch_s=end.fetch_s - start.fetch_s,
        own_s=own_s if folded.knows("forward") else None,
        beats=beats,
        waiting=min(waiting, beats),  # another machine may send anything
        looks=looks,
        moved=min(moved, looks),
        slept=slept,
        gpu_percent=sum(readings) / len(readings) if readings else None,
        on_gpu=str((folded.hello or {}).get("device", "")).startswith("cuda"),
    )
