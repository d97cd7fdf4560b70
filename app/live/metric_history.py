"""The curves of one run on the dashboard: the stored history, then the values that ranks sent
since."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ltui.app.live.curve_arithmetic import GrowingCurve, empty_curve, join, splice
from ltui.app.live.frame import CurveData, FloatArray
from ltui.training.state.metric_name_patterns import TRAIN_LOSS
from ltui.training.state.record_fold import FoldState
from ltui.training.tensor_queue.record_types import StepField

STEP_CURVES = {
    TRAIN_LOSS: StepField.LOSS,
    "step/lr": StepField.LR,
    "step/seconds": StepField.STEP_S,
    "step/fetch_seconds": StepField.FETCH_S,
    "step/forward_seconds": StepField.FORWARD_S,
    "step/backward_seconds": StepField.BACKWARD_S,
    "step/optimizer_seconds": StepField.OPTIMIZER_S,
    "step/samples": StepField.SAMPLES,
    "step/memory_bytes": StepField.MEMORY_BYTES,
}
"""Curves that every step has, by their names in the store."""
POINT_INTERVAL_S = 0.5
"""Seconds of step time between two points of the throughput curve."""
MAX_RANK_CURVES = 8
"""Maximum number of ranks with a curve of their own. With more ranks only the total is kept,
because a chart with hundreds of lines cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRequest:
    """The curves that a screen shows, and their level of detail."""

    names: frozenset[str] | None = None
    """Names of the curves; None means the default choice of ``default_metrics.py``."""
    steps: tuple[int, int] | None = None
    """First and last step of the visible part; None if everything is visible."""


class LatestCurveRequest:
    """Holds the newest request of a screen for the poller thread."""

    def __init__(self) -> None:
        self.request = CurveRequest()


class MetricHistory:
    """Metric curves of rank 0: the stored history followed by live points."""

    def __init__(self) -> None:
        self.version = 0
        """Changes when one of the curves changes that ``curves`` returned last."""
        self._stored: dict[str, CurveData] = {}
        self._detail: dict[str, CurveData] = {}
        self._live: dict[str, GrowingCurve] = {}
        self._joined: dict[str, CurveData] = {}
        self._returned_names: frozenset[str] = frozenset()
        self._loss_is_logged = False
        """The loss is logged as a metric. Then the metric replaces the loss of the step records,
        as in the store: a loss on a GPU is not known yet when its step is recorded."""

    def load(self, stored: Mapping[str, CurveData]) -> None:
        """Replace the stored history of these curves and keep their live points."""
        self._stored |= stored
        self._invalidate(stored)

    def load_detail(self, detail: Mapping[str, CurveData]) -> None:
        """Show a part of these curves in more detail, and no part of any other curve."""
        changed = {*self._detail, *detail}
        self._detail = dict(detail)
        self._invalidate(changed)

    def forget_live(self) -> None:
        """Drop the live points, because a new attempt began or records were missed.

        Live points are collected again after the next load.
        """
        changed = {*self._live, *self._detail}
        self._live.clear()
        self._detail.clear()
        self._invalidate(changed)
        self.version += 1

    def add(self, name: str, step: float, epoch: float, time: float, value: float) -> None:
        """Add a value that rank 0 logged."""
        if name == TRAIN_LOSS and not self._loss_is_logged:
            self._loss_is_logged = True
            self._live.pop(name, None)
        self._live_curve(name).append(step, epoch, time, value)

    def add_steps(self, rows: FloatArray) -> None:
        """Add rows of ``StepField`` to the curves that every step has."""
        places = (StepField.GLOBAL_STEP, StepField.EPOCH, StepField.WALL_S)
        for name, column in STEP_CURVES.items():
            if name == TRAIN_LOSS and self._loss_is_logged:
                continue
            if name in self._live or np.isfinite(rows[:, column]).any():
                self._live_curve(name).extend(rows[:, [*places, column]])

    def names(self) -> set[str]:
        """Return the names of all curves that have points."""
        return self._stored.keys() | self._live.keys()

    def curves(self, names: Collection[str]) -> dict[str, CurveData]:
        """Return the curves among ``names`` that have points."""
        if self._returned_names != frozenset(names):
            self._returned_names = frozenset(names)
            self.version += 1
        for name in names:
            if name not in self._joined and name in self.names():
                live = self._live.get(name)
                joined = join(self._stored.get(name), live.curve() if live else None)
                self._joined[name] = splice(joined, self._detail.get(name, empty_curve()))
        return {name: self._joined[name] for name in names if name in self._joined}

    def _live_curve(self, name: str) -> GrowingCurve:
        self._invalidate((name,))
        return self._live.setdefault(name, GrowingCurve())

    def _invalidate(self, names: Collection[str]) -> None:
        for name in names:
            self._joined.pop(name, None)
        if not self._returned_names.isdisjoint(names):
            self.version += 1


class ThroughputHistory:
    """Throughput in total and per rank: the stored history followed by live points.

    A live point is the value that the fold computes, so that the chart agrees with the figure in
    its border. A point is added only when every rank has a value, so that the total is never that
    of some ranks only.
    """

    def __init__(self) -> None:
        self.version = 0
        self._rates: dict[int | None, GrowingCurve] = {}
        self._stored: dict[int | None, CurveData] = {}
        self._detail: dict[int | None, CurveData] = {}
        self._timed_s = 0.0
        """Step time of the lead rank, in seconds, at the last point."""
        self._cached: tuple[int, dict[int | None, CurveData]] = (0, {})

    def load(self, rates: Mapping[int | None, CurveData]) -> None:
        """Replace the stored history and keep the live points."""
        self._stored = dict(rates)
        self.version += 1

    def load_detail(self, detail: Mapping[int | None, CurveData]) -> None:
        """Show a part in more detail; an empty mapping removes the detail."""
        self._detail = dict(detail)
        self.version += 1

    def forget_live(self) -> None:
        """Drop the live points, because a new attempt began."""
        self._rates.clear()
        self._detail.clear()
        self._timed_s = 0.0
        self.version += 1

    def add(self, fold: FoldState, ranks: Sequence[int]) -> None:
        """Append a point if enough step time has passed since the last one."""
        lead = fold.lowest_active_rank
        if lead is None or lead.totals is None or lead.wall_s is None:
            return
        if 0 <= lead.totals.timed_s - self._timed_s < POINT_INTERVAL_S:
            return
        rates = {rank: f.samples_per_s for rank in ranks if (f := fold.ranks.get(rank))}
        if len(rates) < len(ranks) or any(rate is None for rate in rates.values()):
            return
        self._timed_s = lead.totals.timed_s
        place = (float(lead.global_step or 0), float(lead.epoch or 0), lead.wall_s)
        known_rates = {rank: rate for rank, rate in rates.items() if rate is not None}
        self._live_curve(None).append(*place, sum(known_rates.values()))
        for rank in known_rates if len(known_rates) <= MAX_RANK_CURVES else ():
            self._live_curve(rank).append(*place, known_rates[rank])
        self.version += 1

    def rates(self) -> dict[int | None, CurveData]:
        """Return the curve of each rank; the key None is the total of all ranks."""
        if self._cached[0] != self.version:
            ranks = self._stored.keys() | self._rates.keys()
            self._cached = (self.version, {rank: self._join_curves(rank) for rank in ranks})
        return self._cached[1]

    def _join_curves(self, rank: int | None) -> CurveData:
        live = self._rates.get(rank)
        joined = join(self._stored.get(rank), live.curve() if live else None)
        return splice(joined, self._detail.get(rank, empty_curve()))

    def _live_curve(self, rank: int | None) -> GrowingCurve:
        return self._rates.setdefault(rank, GrowingCurve())
