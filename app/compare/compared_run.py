"""One run as it is compared with others: its facts, settings, curves and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ltui.app.compare.alignment import Clock, Line, line_of
from ltui.app.compare.metric_summary import MetricSummary
from ltui.app.live.curve_arithmetic import smooth
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.curve_reader import Curve

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
        return line_of(
            curve,
            values,
            axis,
            clock=self.clock,
            reference=max(self.curves.values(), key=len),
            steps_per_epoch=self.snapshot.batches_per_epoch,
        )
