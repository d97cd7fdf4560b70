"""What the dashboard keeps of a run's curves: stored history, and what ranks wrote since."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ltui.app.curves import GrowingCurve, join
from ltui.app.frame import CurveData, FloatArray
from ltui.training.queue.records import StepField

TRAIN_LOSS = "train/loss"
POINT_S = 0.5
"""A throughput point covers at least this many seconds of training."""
MAX_PENDING = 4096
RANK_CURVES = 8
"""Above so many ranks only the total is kept: nobody reads hundreds of lines in one chart."""


class CurveBook:
    """Metric curves of rank 0: ``stored`` as loaded, live points behind them."""

    def __init__(self) -> None:
        self.version = 0
        self._stored: dict[str, CurveData] = {}
        self._live: dict[str, GrowingCurve] = {}
        self._joined: dict[str, CurveData] = {}

    def load(self, stored: Mapping[str, CurveData]) -> None:
        """Replace the stored history; live points stay."""
        self._stored = dict(stored)
        self._joined.clear()
        self.version += 1

    def forget_live(self) -> None:
        """A new attempt, or records were missed: what follows stands behind a fresh load."""
        self._live.clear()
        self._joined.clear()
        self.version += 1

    def add(self, name: str, step: float, epoch: float, time: float, value: float) -> None:
        self._live.setdefault(name, GrowingCurve()).append(step, epoch, time, value)
        self._joined.pop(name, None)
        self.version += 1

    def curves(self) -> dict[str, CurveData]:
        for name in self._stored.keys() | self._live.keys():
            if name not in self._joined:
                live = self._live.get(name)
                self._joined[name] = join(self._stored.get(name), live.curve() if live else None)
        return dict(self._joined)


class RateBook:
    """Samples per second, in total and per rank, and the share of waiting for data.

    A point is made only where every rank has reported the same steps, so that a total is never a
    part of one.
    """

    def __init__(self) -> None:
        self.version = 0
        self._pending: dict[int, deque[FloatArray]] = {}
        self._rates: dict[int | None, GrowingCurve] = {}
        self._waits = GrowingCurve()
        self._stored: dict[int | None, CurveData] = {}
        self._stored_waits: CurveData | None = None
        self._copied: tuple[int, dict[int | None, CurveData], CurveData | None] = (0, {}, None)

    def load(self, rates: Mapping[int | None, CurveData], waits: CurveData | None) -> None:
        """Replace the stored history; live points stay."""
        self._stored, self._stored_waits = dict(rates), waits
        self.version += 1

    def forget_live(self) -> None:
        """A new attempt."""
        self._pending.clear()
        self._rates.clear()
        self._waits = GrowingCurve()
        self.version += 1

    def add(self, rank: int, step_row: FloatArray) -> None:
        self._pending.setdefault(rank, deque(maxlen=MAX_PENDING)).append(step_row)

    def settle(self, ranks: Sequence[int]) -> None:
        """Make a point of what all ``ranks`` have done by now, where that is long enough."""
        if not ranks or any(not self._pending.get(rank) for rank in ranks):
            return
        reached = min(self._pending[rank][-1][StepField.GLOBAL_STEP] for rank in ranks)
        done = {rank: self._up_to(rank, reached) for rank in ranks}
        seconds = {rank: _total(rows, StepField.STEP_S) for rank, rows in done.items()}
        longest = max(seconds.values())
        if longest < POINT_S or min(seconds.values()) <= 0:
            return
        for rank in ranks:
            for _ in done[rank]:
                self._pending[rank].popleft()
        self._point(done, seconds, longest)

    def rates(self) -> dict[int | None, CurveData]:
        return self._copies()[1]

    def waits(self) -> CurveData | None:
        return self._copies()[2]

    def _copies(self) -> tuple[int, dict[int | None, CurveData], CurveData | None]:
        if self._copied[0] != self.version:
            rates = {
                rank: join(self._stored.get(rank), live.curve() if live else None)
                for rank in self._stored.keys() | self._rates.keys()
                for live in (self._rates.get(rank),)
            }
            waits = join(self._stored_waits, self._waits.curve())
            self._copied = (self.version, rates, waits if len(waits) else None)
        return self._copied

    def _up_to(self, rank: int, step: float) -> list[FloatArray]:
        rows = []
        for row in self._pending[rank]:
            if row[StepField.GLOBAL_STEP] > step:
                break
            rows.append(row)
        return rows

    def _point(
        self, done: Mapping[int, list[FloatArray]], seconds: Mapping[int, float], longest: float
    ) -> None:
        last = next(iter(done.values()))[-1]
        place = (
            float(last[StepField.GLOBAL_STEP]),
            float(last[StepField.EPOCH]),
            float(last[StepField.WALL_S]),
        )
        samples = {rank: _total(rows, StepField.SAMPLES) for rank, rows in done.items()}
        self._curve(None).append(*place, sum(samples.values()) / longest)
        for rank in done if len(done) <= RANK_CURVES else ():
            self._curve(rank).append(*place, samples[rank] / seconds[rank])
        shares = [_total(rows, StepField.FETCH_S) / seconds[rank] for rank, rows in done.items()]
        self._waits.append(*place, min(1.0, math.fsum(shares) / len(shares)))
        self.version += 1

    def _curve(self, rank: int | None) -> GrowingCurve:
        return self._rates.setdefault(rank, GrowingCurve())


def _total(rows: Iterable[FloatArray], column: StepField) -> float:
    values = np.array([row[column] for row in rows])
    return float(np.sum(values)) if len(values) else 0.0
