"""One run as it is compared with others: its facts, settings, curves, metrics, colour and sign.

Final and best value of a metric, and the steps at which they were logged: a curve is read again
around a point that merges several values, by the function that the caller gives. A run keeps its
colour and its sign once it has been compared.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ltui.app.compare.alignment import Clock, Line, line_of, positions_of
from ltui.app.live.curve_arithmetic import smooth
from ltui.app.live.frame import RunMark
from ltui.app.presentation.chart_axis import chart_marks
from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import MOST_COLOURS, RunLabels
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.state.time_ledger import TimeLedger
from ltui.training.store.curve_reader import Curve, FloatArray
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart_options import COLOURS, LINES, sign_of
from ltui.widgets.view_models import ChartMark

ReadSteps = Callable[["int | None", "int | None"], Curve]
"""Returns the curve between two steps in more detail; None is an open end."""

MAX_READS = 4
"""Times that a curve is read in more detail: once for each size of windows, and once more."""


class Logged(Struct, frozen=True):
    """A logged value and its step."""

    value: float
    """NaN if NaN was logged."""
    step: int
    step_is_exact: bool = True
    """False if the step is that of a window of the history that contains the value."""


class MetricSummary(Struct, frozen=True, kw_only=True):
    """What one metric of a run came to."""

    final: Logged
    lowest: Logged | None
    """None if no finite value was logged."""
    highest: Logged | None
    direction: str | None
    """``min`` or ``max`` if that value is the best one; None if the name does not tell."""

    @property
    def best(self) -> Logged | None:
        """The best value; None if there is none, or if it is not known which one is best."""
        return {"min": self.lowest, "max": self.highest}.get(self.direction or "")


def summarise(curve: Curve, read: ReadSteps, direction: str | None) -> MetricSummary | None:
    """Return the summary of a curve; None if it has no points."""
    if not len(curve):
        return None
    return MetricSummary(
        final=_final(curve, read),
        lowest=_extreme(curve, read, highest=False),
        highest=_extreme(curve, read, highest=True),
        direction=direction,
    )


def _final(curve: Curve, read: ReadSteps) -> Logged:
    for _ in range(MAX_READS):
        if curve.count[-1] <= 1:
            break
        finer = read(int(curve.steps[-1]), None)
        if not len(finer) or finer.count[-1] >= curve.count[-1]:
            break
        curve = finer
    return Logged(float(curve.mean[-1]), round(float(curve.steps[-1])), bool(curve.count[-1] <= 1))


def _extreme(curve: Curve, read: ReadSteps, *, highest: bool) -> Logged | None:
    """Return the first place of the smallest or largest finite value."""
    place = _extreme_place(curve, highest)
    if place is None:
        return None
    value = _bound(curve, highest)[place]
    for _ in range(MAX_READS):
        if curve.count[place] <= 1:
            break
        first = int(curve.steps[place - 1]) if place else None
        last = int(np.ceil(curve.steps[place + 1])) if place + 1 < len(curve) else None
        finer = read(first, last)
        found = _extreme_place(finer, highest)
        # Old steps exist only as windows, and a window at the edge of the range is not read.
        if found is None or _bound(finer, highest)[found] != value:
            break
        if finer.count[found] >= curve.count[place]:
            break
        curve, place = finer, found
    return Logged(float(value), round(float(curve.steps[place])), bool(curve.count[place] <= 1))


def _bound(curve: Curve, highest: bool) -> FloatArray:
    return curve.high if highest else curve.low


def _extreme_place(curve: Curve, highest: bool) -> int | None:
    bound = _bound(curve, highest)
    finite = np.flatnonzero(np.isfinite(bound))
    if not finite.size:
        return None
    values = bound[finite]
    return int(finite[int(values.argmax() if highest else values.argmin())])


LEAST_SMOOTHED = 3
"""A curve with fewer points than this is not smoothed."""


class ComparedRun(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """What is known of one run."""

    snapshot: RunSnapshot
    settings: Mapping[str, str]
    code: Mapping[str, str]
    """Commit, uncommitted changes and packages of the last attempt, as far as they were recorded.

    They are compared, but do not decide which runs are a group.
    """
    environment: Mapping[str, str]
    """Variables of the last attempt, without secrets; empty if they were not recorded."""
    group: str
    """The group that the user gave the run; empty for none."""
    metric_names: tuple[str, ...]
    """All metrics of the run."""
    curves: Mapping[str, Curve]
    """The curves of the metrics that are compared."""
    metrics: Mapping[str, MetricSummary]
    clock: Clock
    time_s: float | None
    """Seconds of all attempts, without the time between them."""
    samples_per_s: float | None
    """Mean over all training steps; waiting for data counts, validation does not."""
    peak_memory_bytes: float | None
    """Most GPU memory that tensors of one rank used at once."""
    time: TimeLedger
    colour: int | None
    """Index of the colour and sign that the run keeps; None if it was never compared."""
    marks: tuple[RunMark, ...]
    """Attempts, changes of the configuration, stalls and checkpoints."""

    @property
    def id(self) -> str:
        return self.snapshot.id

    @cached_property
    def described(self) -> dict[str, str]:
        """Settings and code by name."""
        return {**self.settings, **self.code}

    @property
    def live(self) -> bool:
        return self.snapshot.state in LIVE

    @property
    def is_starting(self) -> bool:
        """Whether the run may still report settings, as programs do before their first step."""
        return self.live and not self.snapshot.global_step

    def line(self, metric: str, axis: str, smoothing: float = 0.0) -> Line | None:
        """Return a metric over an axis; None if the run does not have it."""
        curve = self.curves.get(metric)
        if curve is None or not len(curve):
            return None
        values = smooth(curve, smoothing) if len(curve) >= LEAST_SMOOTHED else curve.mean
        return line_of(self._positions(curve, axis), values)

    def chart_marks(self, axis: str) -> tuple[ChartMark, ...]:
        """Return attempts, changes, stalls and checkpoints at their places on an axis."""
        if self._longest is None:
            return ()
        marks = chart_marks(self.marks, self._longest, partial(self._positions, axis=axis))
        return tuple(sorted(marks, key=lambda mark: mark.at))

    @cached_property
    def _longest(self) -> Curve | None:
        return max(self.curves.values(), key=len, default=None)

    def _positions(self, curve: Curve, axis: str) -> FloatArray:
        return positions_of(
            curve,
            axis,
            clock=self.clock,
            reference=self._longest,
            steps_per_epoch=self.snapshot.batches_per_epoch,
        )


def run_colours(kept: Mapping[str, int | None], leaders: Collection[str] = ()) -> dict[str, int]:
    """Return an index for each run, from which charts take the colour and the sign.

    ``kept`` has the index of each run that was compared before; None for the others. A run keeps
    its colour, and its sign unless another run here has it. Each of the others gets the index that
    its id gives, or the next one with a sign and a colour that few have. The ``leaders`` of groups
    choose first. Where there are more runs than signs, those with the same sign have different
    lines (``dash_of``). The order of the runs changes nothing.
    """
    colours: dict[str, int] = {}
    uses: Counter[object] = Counter()
    for run_id in sorted(kept, key=lambda one: (one not in leaders, kept[one] is None, one)):
        index = kept[run_id]
        if index is None:
            first = zlib.crc32(run_id.encode("utf-8", "replace"))
            candidates = [(first + n) % MOST_COLOURS for n in range(MOST_COLOURS)]
        else:
            candidates = [(index + n) % MOST_COLOURS for n in range(0, MOST_COLOURS, COLOURS)]
        chosen = min(candidates, key=lambda one: [uses[part] for part in _parts(one)])
        line = uses["sign", sign_of(chosen)] % LINES
        uses.update(_parts(chosen))
        colours[run_id] = chosen + line * MOST_COLOURS
    return {run_id: colours[run_id] for run_id in kept}


def _parts(index: int) -> tuple[object, ...]:
    """Return what runs should not share, the most important first: sign, all of it, colour."""
    return ("sign", sign_of(index)), index, ("colour", index % COLOURS)


def keep_colours(
    runs: Sequence[ComparedRun], run_dirs: Sequence[RunDir]
) -> tuple[ComparedRun, ...]:
    """Store the colours of runs that have none yet, and return the runs with them.

    A run whose directory cannot be written is returned as it is.
    """
    colours = run_colours({run.id: run.colour for run in runs})
    dirs = {run_dir.id: run_dir for run_dir in run_dirs}

    def kept(run: ComparedRun) -> ComparedRun:
        def with_colour(labels: RunLabels) -> RunLabels:
            # Another dashboard may have been faster.
            if labels.colour is not None:
                return labels
            return replace(labels, colour=colours[run.id] % MOST_COLOURS)

        if run.colour is None:
            with suppress(ProblemError):
                return replace(run, colour=change_labels(dirs[run.id], with_colour).colour)
        return run

    return tuple(kept(run) for run in runs)
