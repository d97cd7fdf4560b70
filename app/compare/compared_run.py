"""One run as it is compared with others: its facts, settings, curves and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from ltui.app.compare.alignment import Clock, Line, line_of, positions_of
from ltui.app.compare.metric_summary import MetricSummary
from ltui.app.live.curve_arithmetic import smooth
from ltui.app.live.run_marks import RunMark
from ltui.app.presentation.chart_axis import chart_marks
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.curve_reader import Curve, FloatArray
from ltui.widgets.view_models import ChartMark

LEAST_SMOOTHED = 3
"""A curve with fewer points than this is not smoothed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedRun:
    """What is known of one run."""

    snapshot: RunSnapshot
    settings: Mapping[str, str]
    code: Mapping[str, str]
    """Commit, uncommitted changes and packages of the last attempt, as far as they were recorded.

    They are compared, but do not decide which runs are a group.
    """
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
