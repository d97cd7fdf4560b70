"""Find the straggler: the slow rank that all others wait for, step after step. Pure.

In data-parallel training every rank's step takes as long as the slowest rank's. What differs is how
much of the step is the rank's own work. So the straggler is the rank that waits least. It is never
the rank with the longest backward pass, because that contains the time the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_high
from typing import Any, NamedTuple

from msgspec import Struct

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis.evidence import Frame, RankEvidence
from ltui.training.diagnosis.judge_input import PreparedInput, position_facts
from ltui.training.diagnosis.stack_frames import frame_facts, frame_text
from ltui.training.diagnosis.stalls.stall_case import SLOWING, gpu_cause
from ltui.training.diagnosis.stalls.stall_causes import STARVED_REMEDY, explain_stall
from ltui.training.diagnosis.thresholds import WARM_UP_STEPS
from ltui.training.diagnosis.verdict_words import activity_text
from ltui.training.state.record_fold import RankFold, RunningTotals
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdicts import VerdictKind

_WINDOWS = ((10_000_000_000, 0.35), (4_000_000_000, 0.6))
"""Windows in nanoseconds, each with the fraction of a step by which the straggler's own work must
exceed the median rank's. A large difference is reported after a shorter time."""
_MINIMUM_STEPS = 8
"""Minimum steps in a window."""
_LONG_STEPS, _LONG_STEPS_SHARE = 6, 0.6
"""For steps of a second and more, of which a window contains too few: the number of steps, and the
minimum fraction of all of them."""
_EACH_STEP_SHARE = 0.35
"""Minimum fraction of each of these steps."""
_CPU_DELAY, _CPU_DELAY_EXCESS = 0.5, 0.35
"""Minimum fraction of time that a crowded rank waits for a processor, and the minimum by which that
exceeds the median of the others."""
_CROWDED_STEPS, _CROWDED_SHARE = 2, 0.35
"""Minimum steps in a window, and minimum fraction of a step, for a crowded rank."""
_CROWDED_WINDOWS_NS = (3_000_000_000, 10_000_000_000)
MINIMUM_LOSS_S = 0.02
"""Seconds lost in each step below which a straggler is not reported."""
PARTS = ("fetch data", "forward", "optimizer")
"""Names of the parts of a step that are a rank's own work, in the order of ``OwnWork``."""


class OwnWork(NamedTuple):
    """Mean seconds of a rank's steps, and of the parts that are its own work."""

    step_s: float
    fetch_s: float
    forward_s: float
    optimizer_s: float

    @property
    def parts_s(self) -> tuple[float, float, float]:
        return self.fetch_s, self.forward_s, self.optimizer_s


class Slow(Struct, frozen=True, kw_only=True):
    """A rank, or all ranks of a machine, that the others wait for."""

    subject: int
    """Number of the rank or of the machine."""
    ranks: tuple[int, ...]
    share: float
    """Fraction of the step that the others lose."""
    step_s: float
    part: str
    """The part that takes the time: ``fetch data``, ``forward`` or ``optimizer``."""
    own_s: float
    """Seconds of its own work in a step; of a machine the mean of its ranks."""
    middle_s: float
    """Seconds of own work of the median of the other ranks."""

    @property
    def facts(self) -> dict[str, Any]:
        """The values as the evidence of a verdict contains them."""
        return {
            "share": round(self.share, 3),
            "step_s": self.step_s,
            "own_s": self.own_s,
            "middle_s": self.middle_s,
            "moving": True,
        }


WorkByRank = Mapping[int, "OwnWork | None"]


class Span(Struct, frozen=True, kw_only=True):
    """A number of recent steps, and parts of them in which the same must be slow."""

    overall: WorkByRank
    minimum_share: float
    parts: Callable[[], Iterable[WorkByRank]]
    part_minimum_share: float

    def find(
        self, compare: Callable[[WorkByRank], Slow | None], factor: float = 1.0
    ) -> Slow | None:
        """Return what ``compare`` finds in all steps together and in each part alike.

        ``factor`` scales the minimum shares.
        """
        overall = compare(self.overall)
        if overall is None or overall.share < factor * self.minimum_share:
            return None
        for work in self.parts():
            part = compare(work)
            if part is None or part.subject != overall.subject:
                return None
            if part.share < factor * self.part_minimum_share:
                return None
        return overall


def recent_spans(inputs: PreparedInput) -> list[Span]:
    """Return the spans of recent steps in which to look for what is slow."""
    spans = [_window(inputs, window_ns, share) for window_ns, share in _WINDOWS]
    spans.append(_last_steps(inputs, _LONG_STEPS, _LONG_STEPS_SHARE))
    return [span for span in spans if span is not None]


def find_straggler(inputs: PreparedInput, spans: Sequence[Span]) -> Slow | None:
    """Return the straggler; None if no rank holds up the others or too little is known."""
    for span in spans:
        if (straggler := span.find(_compare)) is not None:
            return straggler
    return _crowded_straggler(inputs)


def still_straggles(inputs: PreparedInput, rank: int) -> bool:
    """Return True if a known straggler also prolonged the last step, or is still crowded out."""
    span = _last_steps(inputs, 1, _EACH_STEP_SHARE)
    last_step = span.find(_compare) if span is not None else None
    prolonged = last_step is not None and last_step.subject == rank
    return prolonged or _crowded_rank(inputs) == rank


def _crowded_straggler(inputs: PreparedInput) -> Slow | None:
    """Return the rank that others wait for while it waits for a processor.

    The kernel's figures confirm that the rank is slow, so two steps are enough.
    """
    rank = _crowded_rank(inputs)
    if rank is None:
        return None
    for window_ns in _CROWDED_WINDOWS_NS:
        spans = {
            r: _span(inputs.fold.ranks.get(r), window_ns, _CROWDED_STEPS) for r in inputs.alive
        }
        straggler = _compare(
            {r: _own_work(s[0], s[2]) if s is not None else None for r, s in spans.items()}
        )
        if straggler and straggler.subject == rank and straggler.share >= _CROWDED_SHARE:
            return straggler
    return None


def _crowded_rank(inputs: PreparedInput) -> int | None:
    """Return the rank that waits for a processor far more than the others, or None.

    For a rank that is already reported as the straggler, half of the difference is enough.
    """
    alive, delays = inputs.alive, inputs.cpu_delays
    if len(alive) < 2 or alive.keys() - delays.keys():
        return None
    rank = max(alive, key=lambda r: delays[r])
    active = inputs.history.active.values()
    reported = any(v.kind == VerdictKind.STRAGGLER and v.culprits == (rank,) for v in active)
    factor = 0.5 if reported else 1.0
    excess = delays[rank] - median_high(delays[r] for r in alive if r != rank)
    crowded = delays[rank] >= factor * _CPU_DELAY and excess >= factor * _CPU_DELAY_EXCESS
    return rank if crowded else None


def _last_steps(inputs: PreparedInput, count: int, minimum_share: float) -> Span | None:
    """Return the last ``count`` steps together and each of them; None if too few are known.

    This needs steps that are long enough for totals to be kept of each.
    """
    marks: dict[int, dict[int, RunningTotals]] = {}
    for rank in inputs.alive:
        rank_fold = inputs.fold.ranks.get(rank)
        if rank_fold is None or rank_fold.totals is None:
            return None
        recent = (*rank_fold.recent_totals[-count - 2 :], rank_fold.totals)
        marks[rank] = {round(mark.batches): mark for mark in recent}
    if len(marks) < 2:
        return None
    end = min(max(by_batch) for by_batch in marks.values())
    batches = range(max(WARM_UP_STEPS, end - count), end + 1)
    complete = all(b in by_batch for by_batch in marks.values() for b in batches)
    if len(batches) <= count or not complete:
        return None
    return Span(
        overall=_between(marks, batches[0], end),
        minimum_share=minimum_share,
        parts=lambda: (_between(marks, batch - 1, batch) for batch in batches[1:]),
        part_minimum_share=_EACH_STEP_SHARE,
    )


def _between(marks: Mapping[int, Mapping[int, RunningTotals]], begin: int, end: int) -> WorkByRank:
    """Return the work of the steps between two batches."""
    return {r: _own_work(of_rank[begin], of_rank[end]) for r, of_rank in marks.items()}


def _window(inputs: PreparedInput, window_ns: int, minimum_share: float) -> Span | None:
    """Return the last ``window_ns`` and each half of them; None if too few steps are known.

    Both halves must agree, so that a single slow step makes no straggler.
    """
    marks: dict[int, tuple[RunningTotals, RunningTotals, RunningTotals]] = {}
    for rank in inputs.alive:
        of_rank = _span(inputs.fold.ranks.get(rank), window_ns)
        if of_rank is None:
            return None
        marks[rank] = of_rank
    if len(marks) < 2:
        return None
    return Span(
        overall={r: _own_work(begin, end) for r, (begin, _, end) in marks.items()},
        minimum_share=minimum_share,
        parts=lambda: (
            {r: _own_work(of_rank[i], of_rank[i + 1]) for r, of_rank in marks.items()}
            for i in range(2)
        ),
        part_minimum_share=minimum_share,
    )


def _compare(work_by_rank: WorkByRank) -> Slow | None:
    """Return the rank that works most, compared with the median of the others."""
    work = {r: w for r, w in work_by_rank.items() if w is not None}
    if len(work) < len(work_by_rank):
        return None
    own_s = {r: sum(w.parts_s) for r, w in work.items()}
    slowest = max(own_s, key=lambda r: own_s[r])
    median_s = median_high(s for r, s in own_s.items() if r != slowest)
    step_s = max(w.step_s for w in work.values())
    if step_s <= 0 or own_s[slowest] - median_s < MINIMUM_LOSS_S:
        return None
    others_parts_s = zip(*(w.parts_s for r, w in work.items() if r != slowest), strict=True)
    excess_s = [
        part_s - median_high(others_s)
        for part_s, others_s in zip(work[slowest].parts_s, others_parts_s, strict=True)
    ]
    return Slow(
        subject=slowest,
        ranks=(slowest,),
        share=(own_s[slowest] - median_s) / step_s,
        step_s=step_s,
        part=PARTS[excess_s.index(max(excess_s))],
        own_s=own_s[slowest],
        middle_s=median_s,
    )


def _span(
    rank_fold: RankFold | None, window_ns: int, minimum_steps: int = _MINIMUM_STEPS
) -> tuple[RunningTotals, RunningTotals, RunningTotals] | None:
    """Return the marks at the beginning, the middle and the end of the last full window.

    Return None if the window contains too few steps.
    """
    if rank_fold is None or rank_fold.totals is None:
        return None
    end = rank_fold.totals
    begin = _mark_at(rank_fold.recent_totals, end.t_ns - window_ns)
    middle = _mark_at(rank_fold.recent_totals, end.t_ns - window_ns // 2)
    if begin is None or middle is None or end.batches - begin.batches < minimum_steps:
        return None
    return begin, middle, end


def _mark_at(marks: tuple[RunningTotals, ...], at_ns: int) -> RunningTotals | None:
    """Return the last mark not after ``at_ns``, unless it is in the warm-up."""
    return next(
        (mark for mark in reversed(marks) if mark.t_ns <= at_ns and mark.batches >= WARM_UP_STEPS),
        None,
    )


def _own_work(begin: RunningTotals, end: RunningTotals) -> OwnWork | None:
    """Return the mean step between two marks; None if no step was timed."""
    steps = end.batches - begin.batches
    timed_s = end.timed_s - begin.timed_s
    if steps <= 0 or timed_s <= 0:
        return None
    return OwnWork(
        step_s=timed_s / steps,
        fetch_s=(end.fetch_s - begin.fetch_s) / steps,
        forward_s=(end.forward_s - begin.forward_s) / steps,
        optimizer_s=(end.optimizer_s - begin.optimizer_s) / steps,
    )


def straggler_verdict(
    inputs: PreparedInput, straggler: Slow, rank_evidence: RankEvidence | None
) -> Verdict:
    """Return the verdict; ``rank_evidence`` was collected while the rank straggled."""
    rank, part = straggler.subject, straggler.part
    reason, remedy = REASONS[part]
    process = rank_evidence.process if rank_evidence is not None else None
    if process is not None and process.starved:
        reason = "other processes use its processor core" + activity_text(process)
        remedy = STARVED_REMEDY
    elif part != "fetch data":
        cause = gpu_cause(inputs.gpu_verdicts, (rank,), SLOWING)
        if cause is not None:
            reason, remedy = cause.text, cause.remedy
    line = _observed_line(inputs, straggler, rank_evidence)
    at_line = f" at {frame_text(line)}" if line is not None else ""
    if line is not None and (reason, remedy) == REASONS[part]:
        remedy = f"See why that line takes longer on this rank only. Otherwise: {remedy}"
    return Verdict(
        kind=VerdictKind.STRAGGLER,
        level=VerdictLevel.SLOW,
        culprits=(rank,),
        waiting=tuple(r for r in inputs.alive if r != rank),
        place=f"{part}, {frame_text(line)}" if line is not None else part,
        cause=(
            f"{inputs.ranks_text((rank,))} is the STRAGGLER: the others wait for it"
            f" {100 * straggler.share:.0f} % of each step ({straggler.step_s:.2f} s);"
            f" it spends the time in {part}{at_line}: {reason}"
        ),
        remedy=remedy,
        confidence=0.8,
        evidence={
            **straggler.facts,
            **frame_facts(line),
            "ranks": position_facts(inputs.pulses_of((rank,))),
        },
    )


def _observed_line(
    inputs: PreparedInput, straggler: Slow, rank_evidence: RankEvidence | None
) -> Frame | None:
    """Return the line that the rank was observed in during the slow part of its step."""
    if rank_evidence is None or rank_evidence.phase != straggler.part:
        return None
    return explain_stall(rank_evidence, inputs.pulses.get(straggler.subject)).frame


_SLOW_COMPUTATION = (
    "its computation is slow",
    "Check its device: clocks, temperature, other processes on it.",
)
REASONS = {
    "fetch data": ("its data is slow", "Check its storage, or give it more DataLoader workers."),
    "forward": _SLOW_COMPUTATION,
    "optimizer": _SLOW_COMPUTATION,
}
"""part of a step -> (reason, remedy) if nothing more specific is known."""
