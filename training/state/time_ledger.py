"""Where all wall-clock time of a run went, from what its history holds. Pure.

Times are whole microseconds, so that the parts of any account sum to its wall-clock time exactly.
``RULE`` says what counts where several things happen at once. What nobody observed is unknown.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from statistics import median

from msgspec import Struct, field


class Part(str, Enum):
    """A part of the wall-clock time. The values are printed as JSON and must not change."""

    TRAINING = "training"
    DATA = "data"
    """Waiting for data, within training steps."""
    COMPILATION = "compilation"
    """What the first steps of an attempt took longer than its later ones."""
    VALIDATION = "validation"
    CHECKPOINTS = "checkpoints"
    BETWEEN = "between_steps"
    START_UP = "start_up"
    """From the start of an attempt to its first step."""
    STALLS = "stalls"
    REPEATED = "repeated_steps"
    """Steps that a later attempt has replaced."""
    RESTARTS = "restarts"
    """Between the end of an attempt and its automatic restart."""
    SHUTDOWN = "shutdown"
    """From the last step of an attempt to the end of its processes."""
    PAUSES = "pauses"
    QUEUE = "queue"
    STOPPED = "stopped"
    """Between the end of an attempt and its resume by a person."""
    UNKNOWN = "unknown"


RULE = (
    "What happens at once counts once, as the first of: queue, pause, stall, checkpoint, "
    "validation, step. Of each step, the rank counts that took longest, and the one that waited "
    "longest for data. What nobody observed is unknown: the supervisor was dead, the program "
    "reports no steps, or a step has not ended."
)
CHOSEN = frozenset({Part.PAUSES, Part.QUEUE, Part.STOPPED})
"""Parts in which a run did not train because somebody wanted it so, or had to wait its turn. They
do not count for the goodput."""
LAUNCH_S = 10.0
"""Seconds from the launch to the first attempt from which on the run has waited in a queue."""
COMPILING_STEPS = 10
"""Number of first steps of an attempt of which the excess over a usual step is compilation."""

_ORDER = (Part.QUEUE, Part.PAUSES, Part.STALLS, Part.CHECKPOINTS, Part.VALIDATION, Part.UNKNOWN)
"""The parts that may overlap within an attempt, the first one counts; steps come after them."""
_UNSUPERVISED, _RUNNING, _OUTSIDE = 10, 11, 12
"""Further priorities: the supervisor was dead, an attempt was running, none was."""


class AttemptTimes(Struct, frozen=True, kw_only=True):
    """When an attempt was, in unix seconds, and which of its steps count."""

    number: int
    begin: float
    end: float | None
    """None if its end is not recorded."""
    restarted: bool = False
    """True if it was started automatically."""
    last_step: int = 0
    """The last of its steps that no later attempt has replaced."""


class Interval(Struct, frozen=True, kw_only=True):
    """Something that lasted, in unix seconds."""

    attempt: int
    begin: float
    end: float
    part: Part
    cause: str = ""
    """Of a stall, the kind of its verdict."""
    unsupervised: bool = False
    """True if nobody watched the run: what the ranks have recorded then counts first."""


class StepBlock(Struct, frozen=True, kw_only=True):
    """Consecutive steps of one rank. Blocks of several ranks with one ``group`` belong together."""

    attempt: int
    rank: int
    group: int
    """Ascends within an attempt."""
    first_step: int
    last_step: int
    batches: int
    end: float
    """Unix seconds at the end of its last step."""
    seconds: float
    """All its steps together."""
    fetch_s: float
    """Seconds of that spent waiting for data; 0 if it is not known."""


class TimeFacts(Struct, frozen=True, kw_only=True):
    """What the history of a run says about its time."""

    begin: float
    """Unix time of its launch."""
    until: float
    """Unix time of its end, or until which it was observed."""
    attempts: Sequence[AttemptTimes] = ()
    intervals: Sequence[Interval] = ()
    blocks: Sequence[StepBlock] = ()
    node_of: Mapping[int, int] = field(default_factory=dict)
    """Rank -> number of its machine."""


class Account(Struct, frozen=True, kw_only=True):
    """The time of a run, or of one of its attempts, machines or ranks."""

    number: int | None = None
    """Of the attempt, machine or rank."""
    wall_us: int
    parts_us: dict[str, int]
    """``Part`` -> microseconds; the parts that are not zero."""
    stalls_us: dict[str, int] = field(default_factory=dict)
    """Kind of verdict -> microseconds, which together are the part ``stalls``."""

    def us(self, *parts: Part) -> int:
        """Return the microseconds of these parts."""
        return sum(self.parts_us.get(part.value, 0) for part in parts)

    @property
    def counted_us(self) -> int:
        """Microseconds in which the run should have trained."""
        return self.wall_us - self.us(*CHOSEN)

    @property
    def goodput(self) -> float | None:
        """Fraction of ``counted_us`` in training steps that count; None before the first step."""
        if self.counted_us <= 0 or not self.us(Part.TRAINING, Part.DATA, Part.REPEATED):
            return None
        return self.us(Part.TRAINING) / self.counted_us


class TimeLedger(Struct, frozen=True, kw_only=True):
    """All accounts of a run. Those of its attempts sum to that of the run."""

    begin: float
    run: Account
    goodput: float | None
    attempts: tuple[Account, ...] = ()
    machines: tuple[Account, ...] = ()
    """Empty on one machine. Each has the wall-clock time of the run."""
    ranks: tuple[Account, ...] = ()
    """Each has the wall-clock time of the run."""
    rule: str = RULE


def time_ledger(facts: TimeFacts, most_ranks: int = 0) -> TimeLedger:
    """Return the ledger of a run, with accounts of its first ``most_ranks`` ranks."""
    amounts = _Split(facts, None).amounts
    attempts: dict[int, _Amounts] = {}
    for (attempt, part, cause), us in amounts.items():
        attempts.setdefault(attempt, {})[attempt, part, cause] = us
    run = _account(amounts)
    ranks = sorted({block.rank for block in facts.blocks})[:most_ranks]
    nodes = sorted(set(facts.node_of.values())) if most_ranks else []
    of_node = {n: {r for r, node in facts.node_of.items() if node == n} for n in nodes}
    return TimeLedger(
        begin=facts.begin,
        run=run,
        goodput=run.goodput,
        attempts=tuple(_account(attempts[number], number) for number in sorted(attempts)),
        machines=tuple(
            _account(_Split(facts, members).amounts, node)
            for node, members in of_node.items()
            if len(nodes) > 1
        ),
        ranks=tuple(_account(_Split(facts, {rank}).amounts, rank) for rank in ranks),
    )


_Amounts = dict[tuple[int, Part, str], int]
"""(attempt, part, cause) -> microseconds"""


def _account(amounts: _Amounts, number: int | None = None) -> Account:
    parts: dict[str, int] = {}
    stalls: dict[str, int] = {}
    for (_, part, cause), us in amounts.items():
        parts[part.value] = parts.get(part.value, 0) + us
        if part is Part.STALLS:
            stalls[cause] = stalls.get(cause, 0) + us
    return Account(
        number=number,
        wall_us=sum(parts.values()),
        parts_us={part.value: parts[part.value] for part in Part if parts.get(part.value)},
        stalls_us={cause: us for cause, us in stalls.items() if us},
    )


class _Steps(Struct):
    """Steps of one group, of the slowest rank. Times in microseconds."""

    end: int
    us: int
    fetch_us: int
    batches: int
    lost: float
    """Fraction of the steps that a later attempt has replaced."""
    first_step: int
    excess_us: int = 0
    """What they took longer than usual ones, if they are the first of their attempt."""


class _Split:
    """Divides the wall-clock time as some ranks (None: all) have spent it."""

    def __init__(self, facts: TimeFacts, ranks: set[int] | None) -> None:
        self._begin = _whole(facts.begin) or 0
        self._until = max(self._begin, _whole(facts.until) or 0)
        self._attempts = sorted(facts.attempts, key=lambda a: (self._us(a.begin), a.number))
        self._begins = [*(self._us(attempt.begin) for attempt in self._attempts), self._until]
        """Begins of the attempts, and the end of the run."""
        self._ends = [
            max(begin, next_begin if a.end is None else min(self._us(a.end), next_begin))
            for a, (begin, next_begin) in zip(
                self._attempts, itertools.pairwise(self._begins), strict=True
            )
        ]
        self._steps = self._merged_steps(facts.blocks, ranks)
        self._absent = {block.attempt for block in facts.blocks if block.attempt not in self._steps}
        """Attempts in which other ranks trained, but none of these."""
        self.amounts: _Amounts = {}
        self._divide(list(self._spans(facts.intervals)))

    def _us(self, t: float) -> int:
        """Return a time in microseconds, not outside of the run. Files may contain any number."""
        value = _whole(t)
        if value is None:
            return self._until if t > 0 else self._begin
        return min(max(value, self._begin), self._until)

    # -- steps ---------------------------------------------------------------------------------

    def _merged_steps(
        self, blocks: Iterable[StepBlock], ranks: set[int] | None
    ) -> dict[int, list[_Steps]]:
        """Return the steps of each attempt by group, each of the rank that took longest."""
        last_steps = {attempt.number: attempt.last_step for attempt in self._attempts}
        groups: dict[int, dict[int, _Steps]] = {number: {} for number in last_steps}
        for block in blocks:
            if block.attempt not in groups or (ranks is not None and block.rank not in ranks):
                continue
            us = max(0, _whole(block.seconds) or 0)
            fetch_us = min(us, max(0, _whole(block.fetch_s) or 0))
            end = self._us(block.end)
            lost = _lost_share(block, last_steps[block.attempt])
            steps = _Steps(end, us, fetch_us, max(1, block.batches), lost, block.first_step)
            merged = groups[block.attempt].setdefault(block.group, steps)
            merged.end = max(merged.end, end)
            merged.us = max(merged.us, us)
            merged.fetch_us = max(merged.fetch_us, fetch_us)
        ordered = {
            n: [groups[n][group] for group in sorted(groups[n])] for n in groups if groups[n]
        }
        for of_attempt in ordered.values():
            # A block cannot end later than the next one lets it.
            for later, earlier in itertools.pairwise(reversed(of_attempt)):
                earlier.end = min(earlier.end, max(later.end - later.us, self._begin))
            _note_compilation(of_attempt)
        return ordered

    # -- the division --------------------------------------------------------------------------

    def _spans(self, intervals: Iterable[Interval]) -> Iterator[tuple[int, int, _Key]]:
        """Yield begin, end and key of everything that may claim a moment."""
        first = self._begins[0]
        waited = not self._attempts or first - self._begin >= LAUNCH_S * 1e6
        yield self._begin, first, (_OUTSIDE, Part.QUEUE if waited else Part.START_UP, "")
        limits = {}
        for place, attempt in enumerate(self._attempts):
            begin, end = limits[attempt.number] = self._begins[place], self._ends[place]
            yield begin, end, (_RUNNING, Part.BETWEEN, "")
            if attempt is not self._attempts[-1]:
                restarted = self._attempts[place + 1].restarted
                part = Part.RESTARTS if restarted else Part.STOPPED
                yield end, self._begins[place + 1], (_OUTSIDE, part, "")
                if attempt.end is None:
                    steps = self._steps.get(attempt.number)
                    seen = max(begin, steps[-1].end if steps else begin)
                    yield seen, end, (_UNSUPERVISED, Part.UNKNOWN, "")
        for interval in intervals:
            if interval.attempt not in limits:
                continue
            low, high = limits[interval.attempt]
            begin, end = max(low, self._us(interval.begin)), min(high, self._us(interval.end))
            priority = _UNSUPERVISED if interval.unsupervised else _ORDER.index(interval.part)
            yield begin, end, (priority, interval.part, interval.cause)

    def _divide(self, spans: Sequence[tuple[int, int, _Key]]) -> None:
        marks = {end.end for steps in self._steps.values() for end in steps}
        ends = {a.number: [s.end for s in self._steps.get(a.number, ())] for a in self._attempts}
        free = {number: [[0, 0] for _ in range(len(e) + 1)] for number, e in ends.items()}
        for begin, end, (priority, part, cause) in _pieces(
            spans, {*marks, *self._begins, self._begin}
        ):
            place = bisect_right(self._begins, begin) - 1
            number = self._attempts[place].number if place >= 0 else 0
            if priority in (_RUNNING, _UNSUPERVISED):
                cell = free[number][bisect_left(ends[number], end)]
                cell[priority == _UNSUPERVISED] += end - begin
            else:
                self._add(number, part, end - begin, cause)
        for attempt in self._attempts:
            has_ended = attempt.end is not None or attempt is not self._attempts[-1]
            self._fill(attempt.number, free[attempt.number], has_ended=has_ended)

    def _fill(self, number: int, cells: Sequence[Sequence[int]], *, has_ended: bool) -> None:
        """Give the free time between the ends of blocks to their steps; what is left is not."""
        steps = self._steps.get(number, [])
        for place, (watched, unwatched) in enumerate(cells):
            left = watched + unwatched
            if place < len(steps):
                left -= self._add_steps(number, steps[place], left)
                part = Part.START_UP if place == 0 else Part.BETWEEN
            elif number in self._absent or (steps and not has_ended):
                part = Part.UNKNOWN
            else:
                part = Part.SHUTDOWN if steps else Part.START_UP
            unknown = min(left, unwatched)
            self._add(number, Part.UNKNOWN, unknown)
            self._add(number, part, left - unknown)

    def _add_steps(self, number: int, steps: _Steps, free: int) -> int:
        """Add as much of the time of steps as is free. Return it."""
        us = min(steps.us, free)
        lost = round(us * steps.lost)
        kept = us - lost
        data = min(kept, round(steps.fetch_us * (1.0 - steps.lost)))
        compilation = min(kept - data, round(steps.excess_us * (1.0 - steps.lost)))
        self._add(number, Part.REPEATED, lost)
        self._add(number, Part.DATA, data)
        self._add(number, Part.COMPILATION, compilation)
        self._add(number, Part.TRAINING, kept - data - compilation)
        return us

    def _add(self, number: int, part: Part, us: int, cause: str = "") -> None:
        key = number, part, cause
        self.amounts[key] = self.amounts.get(key, 0) + us


_Key = tuple[int, Part, str]
"""Priority (the lowest claims a moment), part and cause."""


def _pieces(
    spans: Sequence[tuple[int, int, _Key]], marks: set[int]
) -> Iterator[tuple[int, int, _Key]]:
    """Yield pieces without overlap that cover the time between the first and the last mark.

    Each has the key of the lowest priority among the spans around it. No piece contains a mark.
    """
    first, last = min(marks), max(marks)
    changes: dict[int, list[tuple[_Key, int]]] = {mark: [] for mark in marks}
    for begin, end, key in spans:
        if begin < end:
            changes.setdefault(begin, []).append((key, 1))
            changes.setdefault(end, []).append((key, -1))
    active: dict[_Key, int] = {}
    times = sorted(changes)
    for begin, end in itertools.pairwise(times):
        for key, change in changes[begin]:
            count = active.get(key, 0) + change
            if count:
                active[key] = count
            else:
                del active[key]
        if first <= begin and end <= last:
            yield begin, end, min(active, default=(_OUTSIDE, Part.UNKNOWN, ""))


def _lost_share(block: StepBlock, last_step: int) -> float:
    """Return the fraction of the steps of a block that come after ``last_step``."""
    count = max(1, block.last_step - block.first_step + 1)
    return min(1.0, max(0.0, (block.last_step - last_step) / count))


def _note_compilation(steps: Sequence[_Steps]) -> None:
    """Set the excess of the first steps over usual ones, if it is more than a step's time."""
    usual_us = median((s.us - s.fetch_us) / s.batches for s in steps)
    first = steps[0].first_step
    for each in steps:
        if each.first_step - first >= COMPILING_STEPS or len(steps) == 1:
            return
        excess = each.us - each.fetch_us - each.batches * usual_us
        each.excess_us = round(excess) if excess > usual_us else 0


def _whole(seconds: float) -> int | None:
    """Return seconds as whole microseconds; None unless it is a finite number."""
    return round(seconds * 1e6) if math.isfinite(seconds * 1e6) else None
