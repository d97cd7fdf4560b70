"""The rank that all others wait for, step after step: slow, not stuck. Pure.

In data-parallel training every rank's step takes as long as the slowest rank's; what differs is how
much of it is the rank's own work. So the straggler is the rank that waits least: never the one with
the longest backward, in which the others' waiting hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltui.training.run.evidence import RankEvidence
from ltui.training.run.fold import Mark, RankFold
from ltui.training.run.judge.moment import Moment, where
from ltui.training.run.snapshot import Verdict

_WINDOW_NS = 10_000_000_000
_LEAST_STEPS = 8
_SHARE = 0.35
"""Of the step: by how much the straggler's own work exceeds the middle rank's."""
_LEAST_S = 0.02
"""A step in which less is lost is not worth a word."""
_STARVED_SHARE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    rank: int
    share: float
    """Of the step that the others lose."""
    step_s: float
    part: str
    """What takes the time: ``fetch data``, ``forward``, ``optimizer``."""
    own_s: float
    middle_s: float


def find(m: Moment) -> Straggler | None:
    """None where nobody holds the others up, or too little is known."""
    work = {r: w for r in m.alive if (w := _work(m.fold.ranks.get(r))) is not None}
    if len(work) < 2 or len(work) < len(m.alive):
        return None
    own = {r: sum(w[1:]) for r, w in work.items()}
    slowest = max(own, key=lambda r: own[r])
    others = sorted(own[r] for r in own if r != slowest)
    middle = others[len(others) // 2]
    step_s = max(w[0] for w in work.values())
    share = (own[slowest] - middle) / step_s if step_s > 0 else 0.0
    if share < _SHARE or own[slowest] - middle < _LEAST_S:
        return None
    names = ("fetch data", "forward", "optimizer")
    typical = [sorted(w[i + 1] for r, w in work.items() if r != slowest) for i in range(3)]
    excess = [work[slowest][i + 1] - typical[i][len(typical[i]) // 2] for i in range(3)]
    return Straggler(
        rank=slowest,
        share=share,
        step_s=step_s,
        part=names[excess.index(max(excess))],
        own_s=own[slowest],
        middle_s=middle,
    )


def _work(folded: RankFold | None) -> tuple[float, float, float, float] | None:
    """Mean seconds of (step, fetch, forward, optimizer) over the last window."""
    if folded is None or folded.total is None:
        return None
    total = folded.total
    begin = _window(folded.marks, total)
    if begin is None:
        return None
    steps = total.batches - begin.batches
    timed = total.timed_s - begin.timed_s
    if steps < _LEAST_STEPS or timed <= 0:
        return None
    return (
        timed / steps,
        (total.fetch_s - begin.fetch_s) / steps,
        (total.forward_s - begin.forward_s) / steps,
        (total.optimizer_s - begin.optimizer_s) / steps,
    )


def _window(marks: tuple[Mark, ...], total: Mark) -> Mark | None:
    """The mark that a full window began with."""
    before = [mark for mark in marks if total.t_ns - mark.t_ns >= _WINDOW_NS]
    return before[-1] if before else None


def verdict(m: Moment, found: Straggler, close: RankEvidence | None) -> Verdict:
    process = close.process if close is not None else None
    why, remedy = _WHY[found.part]
    if process is not None and (process.run_delay_share or 0) > _STARVED_SHARE:
        why = "another process takes its processor"
        remedy = "Run fewer processes on this machine, or give each rank its own cores."
    pulse = m.pulses.get(found.rank)
    waiting = tuple(r for r in m.alive if r != found.rank)
    return Verdict(
        kind="straggler",
        level="slow",
        culprits=(found.rank,),
        waiting=waiting,
        place=found.part,
        cause=(
            f"rank {found.rank} is the STRAGGLER: the others wait for it {100 * found.share:.0f} %"
            f" of each step ({found.step_s:.2f} s); it spends the time in {found.part}: {why}"
        ),
        remedy=remedy,
        confidence=0.8,
        evidence={
            "share": round(found.share, 3),
            "step_s": found.step_s,
            "own_s": found.own_s,
            "middle_s": found.middle_s,
            "moving": True,
            "ranks": {str(found.rank): where(pulse)} if pulse is not None else {},
        },
    )


_WHY = {
    "fetch data": ("its data is slow", "Look at its storage, or give it more DataLoader workers."),
    "forward": (
        "its compute is slow",
        "Look at its device: clocks, temperature, other processes on it.",
    ),
    "optimizer": (
        "its compute is slow",
        "Look at its device: clocks, temperature, other processes on it.",
    ),
}
