"""The curves of one run on the dashboard: the stored history, then the values that ranks sent
since."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ltui.app.live.curve_arithmetic import GrowingCurve, empty_curve, join, splice
from ltui.training.state.metric_name_patterns import TRAIN_LOSS
from ltui.training.state.record_fold import FoldState
from ltui.training.store.curve_reader import Curve, FloatArray
from ltui.training.tensor_queue.record_types import StepField

STEP_SECONDS = "step/seconds"
"""The duration of each step, also in a program whose samples are unknown."""
STEP_CURVES = {
    TRAIN_LOSS: StepField.LOSS,
    "step/lr": StepField.LR,
    STEP_SECONDS: StepField.STEP_S,
    "step/fetch_seconds": StepField.FETCH_S,
    "step/forward_seconds": StepField.FORWARD_S,
    "step/backward_seconds": StepField.BACKWARD_S,
    "step/optimizer_seconds": StepField.OPTIMIZER_S,
    "step/samples": StepField.SAMPLES,
    "step/memory_bytes": StepField.MEMORY_BYTES,
}
"""Curves that every step has, by their names in the store."""
THROUGHPUT = "throughput/samples_per_s"
"""Name of the total throughput of all ranks as a metric."""
POINT_INTERVAL_S = 0.5
"""Seconds of step time between two points of the throughput curve."""
SHORT_POINTS = 128
"""Minimum number of live points that are kept of a curve that no screen shows."""
MAX_RANK_CURVES = 8
"""Maximum number of ranks with a curve of their own. With more ranks only the total is kept,
because a chart with hundreds of lines cannot be read."""

Key = TypeVar("Key", bound=Hashable)


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
        self._request = CurveRequest()
        self.on_change: Callable[[], object] = lambda: None
        """Called when a screen requests something else."""

    @property
    def request(self) -> CurveRequest:
        return self._request

    @request.setter
    def request(self, request: CurveRequest) -> None:
        if request != self._request:
            self._request = request
            self.on_change()


class CurveHistory(Generic[Key]):
    """Curves of a run by their keys: the stored history followed by live points."""

    def __init__(self) -> None:
        self.version = 0
        """Changes when one of the curves changes that ``curves`` returned last."""
        self._stored: dict[Key, Curve] = {}
        self._detail: dict[Key, Curve] = {}
        self._live: dict[Key, GrowingCurve] = {}
        self._joined: dict[Key, Curve] = {}
        self._returned: frozenset[Key] = frozenset()

    def load(self, stored: Mapping[Key, Curve]) -> None:
        """Replace the stored history of these curves and keep their live points."""
        self._stored |= stored
        self._invalidate(stored)

    def load_detail(self, detail: Mapping[Key, Curve]) -> None:
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

    def keys(self) -> set[Key]:
        """Return the keys of all curves that have points."""
        return self._stored.keys() | self._live.keys()

    def curves(self, keys: Collection[Key] | None = None) -> dict[Key, Curve]:
        """Return the curves among ``keys`` that have points, by default all of them."""
        keys = self.keys() if keys is None else keys
        if self._returned != frozenset(keys):
            self._returned = frozenset(keys)
            self.version += 1
        for key in keys:
            if key not in self._joined and key in self.keys():
                live = self._live.get(key)
                joined = join(self._stored.get(key), live.curve() if live else None)
                self._joined[key] = splice(joined, self._detail.get(key, empty_curve()))
        return {key: self._joined[key] for key in keys if key in self._joined}

    def _live_curve(self, key: Key) -> GrowingCurve:
        self._invalidate((key,))
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = self._new_live_curve(key)
        return live

    def _new_live_curve(self, key: Key) -> GrowingCurve:  # noqa: ARG002 - subclasses use it
        return GrowingCurve()

    def _invalidate(self, keys: Collection[Key]) -> None:
        for key in keys:
            self._joined.pop(key, None)
        if not self._returned.isdisjoint(keys):
            self.version += 1


class MetricHistory(CurveHistory[str]):
    """Metric curves of rank 0 by name."""

    def __init__(self) -> None:
        super().__init__()
        self._loss_is_logged = False
        """The loss is logged as a metric. Then the metric replaces the loss of the step records,
        as in the store: a loss on a GPU is not known yet when its step is recorded."""
        self._whole: frozenset[str] | None = None
        """Names of the curves that are kept as a whole; None for all."""

    def keep_whole(self, names: frozenset[str]) -> None:
        """Keep only these curves as a whole, so that memory does not grow with every metric.

        Of the others only the last live points are kept. They bridge the time until the store has
        newer ones.
        """
        if names == self._whole:
            return
        before, self._whole = self._whole, names
        whole_before = self.keys() if before is None else before
        shortened = whole_before - names
        for name in shortened:
            self._stored.pop(name, None)
        for name in (whole_before ^ names) & self._live.keys():
            rows = self._live[name].last_rows(SHORT_POINTS)
            self._live[name] = self._new_live_curve(name)
            self._live[name].extend(rows)
        self._invalidate(shortened)

    def _new_live_curve(self, key: str) -> GrowingCurve:
        if self._whole is None or key in self._whole:
            return GrowingCurve()
        return GrowingCurve(recent=SHORT_POINTS, older=0)

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


class ThroughputHistory(CurveHistory["int | None"]):
    """Throughput of each rank, and in total under the key None.

    A live point is the value that the fold computes, so that the chart agrees with the figure in
    its border. A point is added only when every rank has a value, so that the total is never that
    of some ranks only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timed_s = 0.0
        """Step time of the lead rank, in seconds, at the last point."""

    def load(self, stored: Mapping[int | None, Curve]) -> None:
        """Replace the whole stored history, because a resumed run may have other ranks."""
        self._invalidate(self._stored)
        self._stored = {}
        super().load(stored)

    def forget_live(self) -> None:
        super().forget_live()
        self._timed_s = 0.0

    def add(self, fold: FoldState, ranks: Sequence[int]) -> None:
        """Append a point if enough step time has passed since the last one."""
        lead = fold.lowest_active_rank
        if lead is None or lead.totals is None or lead.wall_s is None:
            return
        if 0 <= lead.totals.timed_s - self._timed_s < POINT_INTERVAL_S:
            return
        rates = {
            rank: folded.samples_per_s
            for rank in ranks
            if (folded := fold.ranks.get(rank)) and folded.samples_per_s is not None
        }
        if len(rates) < len(ranks):
            return
        self._timed_s = lead.totals.timed_s
        place = (float(lead.global_step or 0), float(lead.epoch or 0), lead.wall_s)
        self._live_curve(None).append(*place, sum(rates.values()))
        for rank in rates if len(rates) <= MAX_RANK_CURVES else ():
            self._live_curve(rank).append(*place, rates[rank])
