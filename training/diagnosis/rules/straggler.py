"""The rank that all others wait for, step after step: slow, not stuck. Pure.

In data-parallel training every rank's step takes as long as the slowest rank's; what differs is how
much of it is the rank's own work. So the straggler is the rank that waits least: never the one with
the longest backward, in which the others' waiting hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltui.training.diagnosis.evidence import Frame, RankEvidence
from ltui.training.diagnosis.rules.gpu_causes import slowing_cause
from ltui.training.diagnosis.rules.judge_input import PreparedInput, position_facts
from ltui.training.diagnosis.rules.stack_frames import frame_facts, frame_text
from ltui.training.diagnosis.rules.stall_causes import STARVED_REMEDY, explain_stall
from ltui.training.diagnosis.rules.thresholds import WARM_UP_STEPS
from ltui.training.diagnosis.rules.verdict_words import activity_text
from ltui.training.state.record_fold import RankFold, RunningTotals
from ltui.training.state.run_snapshot import Verdict

_WINDOWS = ((10_000_000_000, 0.35), (4_000_000_000, 0.6))
"""(ns, share of the step by which the straggler's own work exceeds the middle rank's): what is
glaring is said sooner."""
_LEAST_STEPS = 8
_LONG_STEPS, _LONG_SHARE, _EACH_SHARE = 6, 0.6, 0.35
"""Steps of a second and more, too few for a window: so many, of all and of each of them."""
_DELAYED, _DELAYED_MORE = 0.5, 0.35
"""Share of the time that a rank waits for a processor, and by how much more than the others."""
_DELAYED_STEPS, _DELAYED_SHARE = 2, 0.35
_DELAY_WINDOWS = (3_000_000_000, 10_000_000_000)
_LEAST_S = 0.02
"""A step in which less is lost is not worth a word."""


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


def find(m: PreparedInput) -> Straggler | None:
    """None where nobody holds the others up, or too little is known."""
    for window_ns, least in _WINDOWS:
        if (found := _within(m, window_ns, least)) is not None:
            return found
    return _of_steps(m, _LONG_STEPS, _LONG_SHARE) or _starved(m)


def _starved(m: PreparedInput) -> Straggler | None:
    """The rank that waits for a processor far more than the others, which wait for it.

    What the kernel says of the processor is as good as more steps: two of them are enough.
    """
    rank = _crowded(m)
    if rank is None:
        return None
    for window_ns in _DELAY_WINDOWS:
        spans = {r: _span(m.fold.ranks.get(r), window_ns, _DELAYED_STEPS) for r in m.alive}
        work = {r: _work(s[0], s[2]) if s is not None else None for r, s in spans.items()}
        found = _compare(work)
        if found is not None and found.rank == rank and found.share >= _DELAYED_SHARE:
            return found
    return None


def _crowded(m: PreparedInput) -> int | None:
    """The rank that waits for a processor far more than the others; for one that has been told of,
    half the difference is enough."""
    if len(m.alive) < 2 or m.alive.keys() - m.delays.keys():
        return None
    rank = max(m.alive, key=lambda r: m.delays[r])
    others = sorted(m.delays[r] for r in m.alive if r != rank)
    known = any(v.kind == "straggler" and v.culprits == (rank,) for v in m.history.active.values())
    share, more = (s / 2 if known else s for s in (_DELAYED, _DELAYED_MORE))
    delay = m.delays[rank]
    return rank if delay >= share and delay - others[len(others) // 2] >= more else None


def still(m: PreparedInput, rank: int) -> bool:
    """Whether the last step, too, was the longer for this rank, or other processes still take its
    processor."""
    last = _of_steps(m, 1, _EACH_SHARE)
    return (last is not None and last.rank == rank) or _crowded(m) == rank


def _of_steps(m: PreparedInput, count: int, least: float) -> Straggler | None:
    """The straggler of the last ``count`` steps and of each of them, where steps are so long that
    there is a mark for each."""
    marks: dict[int, dict[int, RunningTotals]] = {}
    for rank in m.alive:
        folded = m.fold.ranks.get(rank)
        if folded is None or folded.totals is None:
            return None
        marks[rank] = {
            round(k.batches): k for k in (*folded.recent_totals[-count - 2 :], folded.totals)
        }
    if len(marks) < 2:
        return None
    end = min(max(of_rank) for of_rank in marks.values())
    wanted = range(max(WARM_UP_STEPS, end - count), end + 1)
    if len(wanted) <= count or any(b not in k for k in marks.values() for b in wanted):
        return None
    whole = _compare({r: _work(k[wanted[0]], k[end]) for r, k in marks.items()})
    if whole is None or whole.share < least:
        return None
    for b in wanted[1:]:
        each = _compare({r: _work(k[b - 1], k[b]) for r, k in marks.items()})
        if each is None or each.rank != whole.rank or each.share < _EACH_SHARE:
            return None
    return whole


def _within(m: PreparedInput, window_ns: int, least: float) -> Straggler | None:
    """The straggler of the last ``window_ns``: of the whole and of each half of it, so that one
    slow step makes none."""
    spans = {r: s for r in m.alive if (s := _span(m.fold.ranks.get(r), window_ns)) is not None}
    if len(spans) < 2 or len(spans) < len(m.alive):
        return None
    whole = _compare({r: _work(begin, end) for r, (begin, _, end) in spans.items()})
    halves = (
        _compare({r: _work(begin, middle) for r, (begin, middle, _) in spans.items()}),
        _compare({r: _work(middle, end) for r, (_, middle, end) in spans.items()}),
    )
    for part in (whole, *halves):
        if part is None or part.rank != whole.rank or part.share < least:  # type: ignore[union-attr]
            return None
    return whole


def _compare(work: dict[int, tuple[float, float, float, float] | None]) -> Straggler | None:
    """The rank that works most, beside the middle one of the others."""
    known = {r: w for r, w in work.items() if w is not None}
    if len(known) < len(work):
        return None
    own = {r: sum(w[1:]) for r, w in known.items()}
    slowest = max(own, key=lambda r: own[r])
    others = sorted(own[r] for r in own if r != slowest)
    middle = others[len(others) // 2]
    step_s = max(w[0] for w in known.values())
    if step_s <= 0 or own[slowest] - middle < _LEAST_S:
        return None
    names = ("fetch data", "forward", "optimizer")
    typical = [sorted(w[i + 1] for r, w in known.items() if r != slowest) for i in range(3)]
    excess = [known[slowest][i + 1] - typical[i][len(typical[i]) // 2] for i in range(3)]
    return Straggler(
        rank=slowest,
        share=(own[slowest] - middle) / step_s,
        step_s=step_s,
        part=names[excess.index(max(excess))],
        own_s=own[slowest],
        middle_s=middle,
    )


def _span(
    folded: RankFold | None, window_ns: int, least_steps: int = _LEAST_STEPS
) -> tuple[RunningTotals, RunningTotals, RunningTotals] | None:
    """Where the last full window begins, about its middle, and its end, in enough steps."""
    if folded is None or folded.totals is None:
        return None
    end = folded.totals
    begin = _mark(folded.recent_totals, end.t_ns - window_ns)
    middle = _mark(folded.recent_totals, end.t_ns - window_ns // 2)
    if begin is None or middle is None or end.batches - begin.batches < least_steps:
        return None
    return begin, middle, end


def _mark(marks: tuple[RunningTotals, ...], at_ns: int) -> RunningTotals | None:
    """The last mark not after ``at_ns``; the first batches, which warm up, make none."""
    return next(
        (k for k in reversed(marks) if k.t_ns <= at_ns and k.batches >= WARM_UP_STEPS), None
    )


def _work(begin: RunningTotals, end: RunningTotals) -> tuple[float, float, float, float] | None:
    """Mean seconds of (step, fetch, forward, optimizer) between two marks."""
    steps = end.batches - begin.batches
    timed = end.timed_s - begin.timed_s
    if steps <= 0 or timed <= 0:
        return None
    return (
        timed / steps,
        (end.fetch_s - begin.fetch_s) / steps,
        (end.forward_s - begin.forward_s) / steps,
        (end.optimizer_s - begin.optimizer_s) / steps,
    )


def verdict(m: PreparedInput, found: Straggler, close: RankEvidence | None) -> Verdict:
    """``close``: a look at the rank while it straggled."""
    why, remedy = _WHY[found.part]
    if close is not None and close.process is not None and close.process.starved:
        why, remedy = "other processes use its processor core", STARVED_REMEDY
        why += activity_text(close.process)
    elif found.part != "fetch data" and (gpu := slowing_cause(m.devices, found.rank)) is not None:
        why, remedy = gpu.text, gpu.remedy
    frame = _line(m, found, close)
    at = f" at {frame_text(frame)}" if frame is not None else ""
    pulse = m.pulses.get(found.rank)
    waiting = tuple(r for r in m.alive if r != found.rank)
    return Verdict(
        kind="straggler",
        level="slow",
        culprits=(found.rank,),
        waiting=waiting,
        place=f"{found.part}, {frame_text(frame)}" if frame is not None else found.part,
        cause=(
            f"rank {found.rank} is the STRAGGLER: the others wait for it {100 * found.share:.0f} %"
            f" of each step ({found.step_s:.2f} s); it spends the time in {found.part}{at}: {why}"
        ),
        remedy=remedy,
        confidence=0.8,
        evidence={
            "share": round(found.share, 3),
            "step_s": found.step_s,
            "own_s": found.own_s,
            "middle_s": found.middle_s,
            "moving": True,
            **frame_facts(frame),
            "ranks": {str(found.rank): position_facts(pulse)} if pulse is not None else {},
        },
    )


def _line(m: PreparedInput, found: Straggler, close: RankEvidence | None) -> Frame | None:
    """The user's line that the rank was seen in, in the part of the step that takes the time."""
    if close is None or close.phase != found.part:
        return None
    return explain_stall(close, m.pulses.get(found.rank)).frame


_WHY = {
    "fetch data": ("its data is slow", "Check its storage, or give it more DataLoader workers."),
    "forward": (
        "its computation is slow",
        "Check its device: clocks, temperature, other processes on it.",
    ),
    "optimizer": (
        "its computation is slow",
        "Check its device: clocks, temperature, other processes on it.",
    ),
}
