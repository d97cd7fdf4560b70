"""Split the time of profiled steps by what the trace of a rank shows. Pure interval arithmetic.

A trace has the events of kineto in Chrome's format: operators on the threads of the host and, of a
device, kernels and copies. Times of a trace are in microseconds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from ltui.training.shared.profile_request import ANCHOR

MOST_NAMES = 10
"""Number of operators, or kernels, that a summary names."""
TINY_KERNEL_US = 10.0
"""Microseconds below which launching a kernel takes longer than the kernel."""
_NAME_LENGTH = 120
_HOST, _KERNEL = "cpu_op", "kernel"
_COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
_COMMUNICATION = re.compile(r"(gloo|nccl|mpi|ucc|rccl|xccl):|nccl|rccl|mscclpp|c10d::", re.I)
_DATA = "enumerate(DataLoader)"

Spans = list[tuple[float, float]]
"""Intervals (begin, end), in order and without overlap."""


class TraceEvent(Struct, frozen=True, gc=False):
    """One event of a trace: only what the summary needs."""

    ph: str = ""
    cat: str = ""
    name: str | int | None = None
    tid: int | str | None = None
    ts: float = 0.0
    dur: float = 0.0

    @property
    def text(self) -> str:
        """The name, limited in length."""
        return str(self.name or "")[:_NAME_LENGTH]


class NamedTime(Struct, frozen=True, kw_only=True):
    """Time of an operator or kernel in an average step, by itself."""

    name: str
    seconds: float
    share: float
    """Fraction of the time of a step; above 1 if several threads compute at the same time."""
    calls: float


class StepSplit(Struct, frozen=True, kw_only=True):
    """What a rank does in an average step. The seconds from ``computing_s`` on add up to it.

    On a device ``computing_s`` is the time of its kernels, and ``data_s`` and ``host_s`` are those
    in which the device is idle. Without one it is the time of operators.
    """

    step_s: float
    computing_s: float
    exposed_s: float
    """Communication while nothing is computed, with the wait for other ranks."""
    copies_s: float
    data_s: float
    """The rank waits for a batch."""
    host_s: float
    """Nothing of all this: Python between the operators, or the launch of kernels."""
    overlapped_s: float
    """Communication while something is computed, which is part of ``computing_s``."""


class RankProfile(Struct, frozen=True, kw_only=True):
    """Summary of the trace of one rank."""

    rank: int
    steps: int
    split: StepSplit
    on_device: bool
    top: tuple[NamedTime, ...]
    kernels: float = 0.0
    """Kernels in a step."""
    tiny_kernels: float = 0.0
    peak_bytes: int = 0
    """Most bytes of the device, or of the process, in a step."""
    threads: int = 0


class RankReport(Struct, frozen=True, kw_only=True):
    """What a rank wrote beside its trace. Times are on its monotonic clock, in nanoseconds."""

    rank: int
    error: str | None = None
    anchor_ns: int = 0
    steps: tuple[tuple[int, int, int], ...] = ()
    """Number, begin and end of each step."""
    excluded: tuple[tuple[int, int], ...] = ()
    on_device: bool = False
    peak_bytes: int = 0
    threads: int = 0


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the intervals in order, with those that overlap joined."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(first: Spans, second: Spans) -> Spans:
    """Return what lies in both."""
    return difference(first, difference(first, second))


def difference(first: Spans, second: Spans) -> Spans:
    """Return what lies in the first one only."""
    left: Spans = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > begin:
                left.append((begin, second[k][0]))
            begin = max(begin, second[k][1])
            k += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(spans: Spans) -> float:
    """Return how long the intervals are together."""
    return sum(end - begin for begin, end in spans)


def summarise_rank(report: RankReport, events: Sequence[TraceEvent]) -> RankProfile:
    """Return the summary of a rank.

    Raises ``ValueError`` if the trace has nothing of the steps: such a profile is no success.
    """
    anchors = [event.ts for event in events if event.name == ANCHOR]
    if not anchors or not report.steps:
        raise ValueError(f"the trace of rank {report.rank} is empty")
    origin = max(anchors) - report.anchor_ns * 1e-3
    steps = union((origin + begin * 1e-3, origin + end * 1e-3) for _, begin, end in report.steps)
    left_out = union((origin + begin * 1e-3, origin + end * 1e-3) for begin, end in report.excluded)
    steps = difference(steps, left_out)
    complete = [event for event in events if event.ph == "X" and event.dur >= 0]
    kinds = {_KERNEL} if report.on_device else {_HOST}
    work = [e for e in complete if e.cat in kinds and _meets(e, steps)]
    if not work:
        what = "kernel of the device" if report.on_device else "operator"
        raise ValueError(f"the trace of rank {report.rank} has no {what} in the profiled steps")
    count = len(report.steps)
    seconds = 1e-6 / count
    split = _split(complete, steps, seconds, on_device=report.on_device)
    if report.on_device:
        times, calls = _times_of_kernels(work)
    else:
        times, calls = _own_times([e for e in work if not _COMMUNICATION.match(e.text)])
    top = tuple(
        NamedTime(
            name=name,
            seconds=us * seconds,
            share=us * seconds / split.step_s if split.step_s else 0.0,
            calls=calls[name] / count,
        )
        for name, us in times.most_common(MOST_NAMES)
    )
    return RankProfile(
        rank=report.rank,
        steps=count,
        split=split,
        on_device=report.on_device,
        top=top,
        kernels=len(work) / count if report.on_device else 0.0,
        tiny_kernels=sum(e.dur < TINY_KERNEL_US for e in work) / count if report.on_device else 0.0,
        peak_bytes=report.peak_bytes,
        threads=report.threads,
    )


def _meets(event: TraceEvent, steps: Spans) -> bool:
    """Return True if the middle of an event lies in a step."""
    middle = event.ts + event.dur / 2
    return any(begin <= middle <= end for begin, end in steps)


def _split(
    events: Sequence[TraceEvent], steps: Spans, seconds: float, *, on_device: bool
) -> StepSplit:
    """Divide the steps. Each part takes what those before it have left."""
    computing, communication, copies, data = (list[tuple[float, float]]() for _ in range(4))
    for event in events:
        span = event.ts, event.ts + event.dur
        name = event.text
        if event.cat == "user_annotation" and name.startswith(_DATA):
            data.append(span)
        elif on_device and event.cat == _KERNEL:
            (communication if _COMMUNICATION.search(name) else computing).append(span)
        elif on_device and event.cat in _COPIES:
            copies.append(span)
        elif not on_device and event.cat in (_HOST, "user_annotation"):
            if _COMMUNICATION.match(name):
                communication.append(span)
            elif event.cat == _HOST:
                computing.append(span)
    # Without a device, the operators that build a batch are part of the wait for it.
    fetching = intersection(union(data), steps)
    busy = intersection(union(computing), steps)
    if not on_device:
        busy = difference(busy, fetching)
    transfers = intersection(union(communication), steps)
    overlapped, exposed = intersection(transfers, busy), difference(transfers, busy)
    if not on_device:
        exposed = difference(exposed, fetching)
    rest = difference(difference(steps, busy), exposed)
    copied = intersection(union(copies), rest)
    rest = difference(rest, copied)
    waiting = intersection(fetching, rest)
    return StepSplit(
        step_s=length(steps) * seconds,
        computing_s=length(busy) * seconds,
        exposed_s=length(exposed) * seconds,
        copies_s=length(copied) * seconds,
        data_s=length(waiting) * seconds,
        host_s=length(difference(rest, waiting)) * seconds,
        overlapped_s=length(overlapped) * seconds,
    )


def _times_of_kernels(kernels: Sequence[TraceEvent]) -> tuple[Counter[str], Counter[str]]:
    """Return microseconds and number of calls by name."""
    times, calls = Counter[str](), Counter[str]()
    for event in kernels:
        times[event.text] += event.dur  # type: ignore[assignment]
        calls[event.text] += 1
    return times, calls


def _own_times(operators: Sequence[TraceEvent]) -> tuple[Counter[str], Counter[str]]:
    """Return microseconds without those of inner operators, and number of calls, by name."""
    times, calls = Counter[str](), Counter[str]()
    threads: dict[int | str | None, list[TraceEvent]] = defaultdict(list)
    for event in operators:
        threads[event.tid].append(event)
    for thread in threads.values():
        outer: list[TraceEvent] = []
        for event in sorted(thread, key=lambda e: (e.ts, -e.dur)):
            while outer and outer[-1].ts + outer[-1].dur <= event.ts:
                outer.pop()
            if outer:
                times[outer[-1].text] -= event.dur  # type: ignore[assignment]
            times[event.text] += event.dur  # type: ignore[assignment]
            calls[event.text] += 1
            outer.append(event)
    return times, calls
