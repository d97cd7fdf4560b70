"""The dashboard's curves of one run: stored history, then what ranks sent since."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ltui.app.live.curve_arithmetic import GrowingCurve, empty_curve, join, splice
from ltui.app.live.frame import CurveData, FloatArray
from ltui.training.state.metric_names import TRAIN_LOSS
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
"""Curves that every step has, by the names that the store gives them."""
POINT_INTERVAL_S = 0.5
"""Seconds of training steps between two points of the throughput curve."""
MAX_RANK_CURVES = 8
"""With more ranks, only the total is kept: nobody reads hundreds of lines in one chart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRequest:
    """Which curves a screen shows, and at what detail."""

    names: frozenset[str] | None = None
    """None: the default choice of ``metric_choice.py``."""
    steps: tuple[int, int] | None = None
    """First and last step of the part in view; None where all of it is in view."""


class LatestCurveRequest:
    """Holds the newest request of a screen, for its feed's thread to read."""

    def __init__(self) -> None:
        self.request = CurveRequest()


class MetricHistory:
    """Metric curves of rank 0: stored history with live points behind it."""

    def __init__(self) -> None:
        self.version = 0
        """Changes when a curve does that ``curves`` last gave."""
        self._stored: dict[str, CurveData] = {}
        self._detail: dict[str, CurveData] = {}
        self._live: dict[str, GrowingCurve] = {}
        self._joined: dict[str, CurveData] = {}
        self._given: frozenset[str] = frozenset()
        self._loss_is_logged = False
        """Whether the loss comes as a metric. Then it wins over the steps' own, as in the store: a
        loss on a GPU is not known yet when its step is written."""

    def load(self, stored: Mapping[str, CurveData]) -> None:
        """Replace the stored history of these curves; live points stay."""
        self._stored |= stored
        self._forget_joined(stored)

    def load_detail(self, detail: Mapping[str, CurveData]) -> None:
        """Show a part of these curves in more detail, and no part of any other."""
        changed = {*self._detail, *detail}
        self._detail = dict(detail)
        self._forget_joined(changed)

    def forget_live(self) -> None:
        """A new attempt, or records were missed: live points begin anew after a fresh load."""
        changed = {*self._live, *self._detail}
        self._live.clear()
        self._detail.clear()
        self._forget_joined(changed)
        self.version += 1

    def add(self, name: str, step: float, epoch: float, time: float, value: float) -> None:
        if name == TRAIN_LOSS and not self._loss_is_logged:
            self._loss_is_logged = True
            self._live.pop(name, None)
        self._growing(name).append(step, epoch, time, value)

    def add_steps(self, rows: FloatArray) -> None:
        """Rows of ``StepField``: every step's own curves."""
        places = (StepField.GLOBAL_STEP, StepField.EPOCH, StepField.WALL_S)
        for name, column in STEP_CURVES.items():
            if name == TRAIN_LOSS and self._loss_is_logged:
                continue
            if name in self._live or np.isfinite(rows[:, column]).any():
                self._growing(name).extend(rows[:, [*places, column]])

    def names(self) -> set[str]:
        return self._stored.keys() | self._live.keys()

    def curves(self, names: Collection[str]) -> dict[str, CurveData]:
        """The curves of ``names`` that have points."""
        if self._given != frozenset(names):
            self._given = frozenset(names)
            self.version += 1
        for name in names:
            if name not in self._joined and name in self.names():
                live = self._live.get(name)
                joined = join(self._stored.get(name), live.curve() if live else None)
                self._joined[name] = splice(joined, self._detail.get(name, empty_curve()))
        return {name: self._joined[name] for name in names if name in self._joined}

    def _growing(self, name: str) -> GrowingCurve:
        self._forget_joined((name,))
        return self._live.setdefault(name, GrowingCurve())

    def _forget_joined(self, names: Collection[str]) -> None:
        for name in names:
            self._joined.pop(name, None)
        if not self._given.isdisjoint(names):
            self.version += 1


class ThroughputHistory:
    """Throughput in total and per rank: stored history with live points behind it.

    A live point is the figure that the fold gives, so the chart draws what its border shows. It is
    made only when every rank has one, so that a total is never a part of one.
    """

    def __init__(self) -> None:
        self.version = 0
        self._rates: dict[int | None, GrowingCurve] = {}
        self._stored: dict[int | None, CurveData] = {}
        self._detail: dict[int | None, CurveData] = {}
        self._timed_s = 0.0
        """Seconds of the lead rank's steps at the last point."""
        self._copied: tuple[int, dict[int | None, CurveData]] = (0, {})

    def load(self, rates: Mapping[int | None, CurveData]) -> None:
        """Replace the stored history; live points stay."""
        self._stored = dict(rates)
        self.version += 1

    def load_detail(self, detail: Mapping[int | None, CurveData]) -> None:
        """Show a part in more detail; an empty mapping ends that."""
        self._detail = dict(detail)
        self.version += 1

    def forget_live(self) -> None:
        """A new attempt."""
        self._rates.clear()
        self._detail.clear()
        self._timed_s = 0.0
        self.version += 1

    def add(self, fold: FoldState, ranks: Sequence[int]) -> None:
        """Append a point once the steps since the last one are long enough."""
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
        known = {rank: rate for rank, rate in rates.items() if rate is not None}
        self._curve(None).append(*place, sum(known.values()))
        for rank in known if len(known) <= MAX_RANK_CURVES else ():
            self._curve(rank).append(*place, known[rank])
        self.version += 1

    def rates(self) -> dict[int | None, CurveData]:
        if self._copied[0] != self.version:
            ranks = self._stored.keys() | self._rates.keys()
            self._copied = (self.version, {rank: self._joined(rank) for rank in ranks})
        return self._copied[1]

    def _joined(self, rank: int | None) -> CurveData:
        live = self._rates.get(rank)
        joined = join(self._stored.get(rank), live.curve() if live else None)
        return splice(joined, self._detail.get(rank, empty_curve()))

    def _curve(self, rank: int | None) -> GrowingCurve:
        return self._rates.setdefault(rank, GrowingCurve())
