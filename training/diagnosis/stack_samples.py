"""Compare the stacks of a slow rank with those of a normal one: where does its time go? Pure.

Ranks of one process group take steps of equal length. So the slow one spends more time at some
place, and the normal one waits for as long. Time in which ranks wait for each other is left out of
the search. The place that tells most is the innermost function in which almost all of the
difference is spent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ltui.training.diagnosis.evidence import Frame, ThreadStack
from ltui.training.diagnosis.sample_report import SampleReport, SampleRow
from ltui.training.diagnosis.stack_frames import (
    collective_in,
    frame_text,
    in_gpu_synchronization,
    is_library_file,
    point_to_point_call_in,
    user_frame,
    waits_for_loader,
)

MINIMUM_S, MINIMUM_SHARE = 0.3, 0.08
"""Least difference that is named: seconds, and fraction of the time that was sampled."""
_MOST_OF_IT = 0.7
"""Fraction of the largest difference that an inner function must have to be named instead. The
sampler waits up to 5 ms for the GIL, and sees too often the places that release it."""
_HELD_SHARE = 0.5
_MAX_ROWS, _SHORTEST_ROW_S = 24, 0.05
_MAX_CHARS = 100
_MAX_MISSING_CHARS = 300

_Place = tuple[str, str]
"""File and function."""


class StackTime(Struct, frozen=True, kw_only=True):
    """A stack, innermost frame first, and the seconds in which the thread was there."""

    frames: tuple[Frame, ...] = ()
    seconds: float
    held_s: float = 0.0
    """Seconds in which it computed and no other thread could run Python."""


class StackSamples(Struct, frozen=True, kw_only=True):
    """Samples of one thread, as a rank writes them (``rank/stack_sampler.py``)."""

    request: int = 0
    seconds: float
    stacks: tuple[StackTime, ...] = ()


class SampledRank(Struct, frozen=True, kw_only=True):
    """What was sampled of one rank."""

    rank: int
    main: StackSamples | None = None
    held_at: ThreadStack | None = None
    """The stack of the main thread if there are no samples, because no Python runs."""
    workers: tuple[StackSamples, ...] = ()
    missing: tuple[str, ...] = ()


class Difference(Struct, frozen=True, kw_only=True):
    """The place where one rank spends more time than another."""

    text: str
    """``decode (ImageFile.py:293), called by data.py:31 in __getitem__``."""
    slow_s: float
    normal_s: float
    held_s: float
    """Seconds in it in which no other thread could run Python."""
    held_at: str
    """The place with the most of these seconds."""
    in_loader: bool
    """True if the rank waits for its DataLoader workers there."""


def find_difference(
    slow: Sequence[StackTime], normal: Sequence[StackTime], seconds: float
) -> Difference | None:
    """Return where ``slow`` has more time than ``normal``; None if they are alike."""
    slow_s, normal_s = _inclusive(slow), _inclusive(normal)
    excess_s = {place: s - normal_s.get(place, 0.0) for place, s in slow_s.items()}
    largest_s = max(excess_s.values(), default=0.0)
    if largest_s < max(MINIMUM_S, MINIMUM_SHARE * seconds):
        return None
    depth = {place: d for stack in slow for d, place in enumerate(_places(stack))}
    # An inner function takes no longer than its callers.
    place = min(
        (place for place, s in excess_s.items() if s >= _MOST_OF_IT * largest_s),
        key=lambda place: (slow_s[place], -depth[place]),
    )
    inside = [stack for stack in slow if place in _places(stack)]
    longest = max(inside, key=lambda stack: stack.seconds)
    index = next(i for i, frame in enumerate(longest.frames) if _place(frame) == place)
    held: dict[str, float] = {}
    for stack in inside:
        at = _place_text(stack.frames)
        held[at] = held.get(at, 0.0) + stack.held_s
    return Difference(
        text=_place_text(longest.frames[index:]),
        slow_s=slow_s[place],
        normal_s=normal_s.get(place, 0.0),
        held_s=sum(held.values()),
        held_at=max(held, key=lambda at: held[at]),
        in_loader=waits_for_loader(_stack(longest.frames)),
    )


def compare(slow: SampledRank, normal: SampledRank | None, taken_at: float) -> SampleReport:
    """Return what the slow rank does while the normal one waits for it.

    Without a normal rank, nothing is compared, and the place with the most time is named.
    """
    both = (slow,) if normal is None else (slow, normal)
    missing = tuple(
        f"rank {r.rank}: {_printable(text, _MAX_MISSING_CHARS)}" for r in both for text in r.missing
    )
    mains = [r.main for r in both if r.main is not None]
    seconds = next((samples.seconds for samples in (*mains, *slow.workers)), 0.0)
    sentence, differs = _sentence(slow, normal, seconds)
    other_main = None if normal is None or normal.main is None else [normal.main]
    workers = None if normal is None else [_at_work(w) for w in normal.workers]
    return SampleReport(
        taken_at=taken_at,
        seconds=seconds,
        slow=slow.rank,
        normal=None if normal is None else normal.rank,
        differs=differs,
        sentence=sentence,
        rows=() if slow.main is None else _rows([slow.main], other_main, seconds),
        workers=_rows([_at_work(w) for w in slow.workers], workers, seconds),
        missing=missing,
    )


def _sentence(slow: SampledRank, normal: SampledRank | None, seconds: float) -> tuple[str, bool]:
    """Return the sentence of the report, and whether it names a difference."""
    rank = f"rank {slow.rank}"
    if slow.main is None:
        if slow.held_at is None:
            return f"{rank} could not be sampled", False
        at = _place_text(slow.held_at.frames)
        return f"no Python ran on {rank}, because a call of C code at {at} holds the GIL", True
    if normal is None:
        return f"{rank} {_most_of(slow.main, seconds)}; there is no rank to compare it with", False
    if normal.main is None:
        return f"{rank} {_most_of(slow.main, seconds)}; rank {normal.rank} gave no samples", False
    stacks, others = (_mean([main], seconds) for main in (slow.main, normal.main))
    busy, other_busy = ([s for s in of if not _waits(s)] for of in (stacks, others))
    found = find_difference(busy, other_busy, seconds)
    if found is None:
        waits_s, other_s = (sum(s.seconds for s in of if _waits(s)) for of in (stacks, others))
        if waits_s - other_s >= max(MINIMUM_S, MINIMUM_SHARE * seconds):
            return (
                f"rank {normal.rank} did not wait for {rank} while both were sampled: {rank} spent"
                f" {waits_s:.1f} s of {seconds:.0f} s in backward and collectives, where ranks wait"
                f" for each other, and rank {normal.rank} {other_s:.1f} s"
            ), False
        return (
            f"no difference was found: {rank} and rank {normal.rank} spent {seconds:.0f} s alike"
        ), False
    times = f"{found.slow_s:.1f} s of {seconds:.0f} s"
    other = f"rank {normal.rank} {found.normal_s:.1f} s"
    if found.in_loader:
        text = f"{rank} waits {times} for its DataLoader workers, {other}"
        return text + _worker_clause(slow, normal, seconds), True
    text = f"{rank} spends {times} in {found.text}, {other}"
    if found.held_s >= _HELD_SHARE * found.slow_s:
        there = "there" if found.held_at == found.text else f"at {found.held_at}"
        text += (
            f"; for {found.held_s:.1f} s no other Python could run, because a call of C code"
            f" {there} holds the GIL"
        )
    return text, True


def _worker_clause(slow: SampledRank, normal: SampledRank, seconds: float) -> str:
    if not slow.workers or not normal.workers:
        return ". The workers were not sampled"
    mean, other_mean = (_mean([_at_work(w) for w in r.workers], seconds) for r in (slow, normal))
    found = find_difference(mean, other_mean, seconds)
    if found is None:
        return ". Its workers do what those of the other rank do"
    return (
        f". Each of its workers spends {found.slow_s:.1f} s of {seconds:.0f} s in {found.text},"
        f" those of rank {normal.rank} {found.normal_s:.1f} s"
    )


def _most_of(samples: StackSamples, seconds: float) -> str:
    row = max(_rows([samples], None, seconds), key=lambda r: r.slow_s, default=None)
    if row is None:
        return "ran no Python"
    return f"spends {row.slow_s:.1f} s of {seconds:.0f} s in {row.where}"


# -- stacks ----------------------------------------------------------------------------------------


def _rows(
    slow: Sequence[StackSamples], normal: Sequence[StackSamples] | None, seconds: float
) -> tuple[SampleRow, ...]:
    """Return the seconds of the most different places, those with more on the slow side first."""
    slow_s, names = _by_site(_mean(slow, seconds))
    normal_s, other_names = _by_site(_mean(normal or (), seconds))
    names = {**other_names, **names}
    rows = [
        SampleRow(
            where=name,
            slow_s=round(slow_s.get(site, 0.0), 2),
            normal_s=None if normal is None else round(normal_s.get(site, 0.0), 2),
        )
        for site, name in names.items()
    ]
    rows = [r for r in rows if max(r.slow_s, r.normal_s or 0.0) >= _SHORTEST_ROW_S]
    rows.sort(key=lambda r: (-abs(r.slow_s - (r.normal_s or 0.0)), r.where))
    return tuple(sorted(rows[:_MAX_ROWS], key=lambda r: (r.normal_s or 0.0) - r.slow_s))


def _by_site(stacks: Iterable[StackTime]) -> tuple[dict[Frame, float], dict[Frame, str]]:
    """Return line of user code -> its seconds, and -> its text with the innermost function."""
    seconds: dict[Frame, float] = {}
    longest: dict[Frame, StackTime] = {}
    for stack in stacks:
        if not stack.frames:
            continue
        site = user_frame(_stack(stack.frames)) or stack.frames[0]
        seconds[site] = seconds.get(site, 0.0) + stack.seconds
        if site not in longest or stack.seconds > longest[site].seconds:
            longest[site] = stack
    names = {}
    for site, stack in longest.items():
        inner = stack.frames[0]
        called = "" if _place(inner) == _place(site) else f" > {_printable(inner.function)}"
        names[site] = f"{_text(site)}{called}"
    return seconds, names


def _inclusive(stacks: Iterable[StackTime]) -> Mapping[_Place, float]:
    """Return function -> seconds in it and in what it calls."""
    seconds: dict[_Place, float] = {}
    for stack in stacks:
        for place in set(_places(stack)):
            seconds[place] = seconds.get(place, 0.0) + stack.seconds
    return seconds


def _mean(samples: Sequence[StackSamples], seconds: float) -> list[StackTime]:
    """Return the stacks of all threads as if one thread had been sampled for ``seconds``."""
    stacks = []
    for thread in samples:
        factor = seconds / thread.seconds / len(samples) if thread.seconds > 0 else 0.0
        stacks += [
            StackTime(frames=s.frames, seconds=s.seconds * factor, held_s=s.held_s * factor)
            for s in thread.stacks
        ]
    return stacks


def _at_work(samples: StackSamples) -> StackSamples:
    """Return the samples of a worker without those in which it waits for the rank.

    The frames of the rank, from which it was forked, are left out.
    """
    stacks = []
    for stack in samples.stacks:
        names = [f.function for f in stack.frames]
        end = names.index("_worker_loop") if "_worker_loop" in names else len(names)
        inner = stack.frames[:end]
        waits = any(f.function == "get" and f.file.endswith("/queues.py") for f in inner)
        if inner and not waits:
            stacks.append(StackTime(frames=inner, seconds=stack.seconds, held_s=stack.held_s))
    return StackSamples(seconds=samples.seconds, stacks=tuple(stacks))


def _waits(stack: StackTime) -> bool:
    """Return True if the rank may wait for others: in a collective, or in a backward pass."""
    thread = _stack(stack.frames)
    return bool(stack.frames) and (
        stack.frames[0].function == "_engine_run_backward"
        or collective_in(thread) is not None
        or point_to_point_call_in(thread) is not None
        or in_gpu_synchronization(thread)
    )


def _stack(frames: tuple[Frame, ...]) -> ThreadStack:
    return ThreadStack(name="main", main=True, frames=frames)


def _places(stack: StackTime) -> list[_Place]:
    """Return the functions of a stack, outermost first."""
    return [_place(frame) for frame in reversed(stack.frames)]


def _place(frame: Frame) -> _Place:
    return frame.file, frame.function


def _place_text(frames: tuple[Frame, ...]) -> str:
    """Return the innermost frame, and the line of user code that called it, if it is a library."""
    caller = user_frame(_stack(frames)) if is_library_file(frames[0].file) else None
    called = f", called by {_text(caller)}" if caller is not None else ""
    return f"{_text(frames[0])}{called}"


def _text(frame: Frame | None) -> str:
    return _printable(frame_text(frame) or "an unknown place")


def _printable(text: str, most: int = _MAX_CHARS) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:most])
