"""The curves of one run that its screens request: metrics, throughput and readings of GPUs.

They are read from the store when a screen requests them, and continued with what the ranks send.
There is no thread and no clock here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ltui.app.live.default_metrics import default_choice
from ltui.app.live.gpu_curves import GpuCurves, gpu_curve_names, is_gpu_curve
from ltui.app.live.metric_history import (
    STEP_CURVES,
    STEP_SECONDS,
    THROUGHPUT,
    LatestCurveRequest,
    MetricHistory,
    ThroughputHistory,
)
from ltui.app.live.stored_curves import stored_curve, stored_rates, stored_segment
from ltui.training.state.metric_name_patterns import TRAIN_LOSS
from ltui.training.state.record_fold import logged_row, step_rows
from ltui.training.state.run_snapshot import GpuSnapshot
from ltui.training.store.curve_reader import Curve
from ltui.training.store.history_reader import RunStore
from ltui.training.tensor_queue.record_types import RecordKind

ALWAYS_SHOWN = ("step/lr",)
"""Curves that every frame holds although no chart shows them: the details show their newest
value."""
MAX_KEPT = 64
"""Maximum number of curves that stay in memory, those that were requested last."""


class RunCurves:
    """The loaded curves of a run."""

    def __init__(self, requests: LatestCurveRequest) -> None:
        self._requests = requests
        self._metrics = MetricHistory()
        self._gpus = GpuCurves()
        self.throughput = ThroughputHistory()
        self.hides_step_loss = False
        """The program logs the loss of each step itself, so ``train/loss`` is not shown."""
        self._gpu_names: frozenset[str] = frozenset()
        self._stored_names: set[str] = set()
        self._loaded: set[str] = set()
        self._kept: dict[str, None] = {}
        """Names that were requested, the latest last."""
        self._detailed: tuple[frozenset[str], tuple[int, int] | None] = (frozenset(), None)

    @property
    def version(self) -> int:
        """Changes when a requested curve changes."""
        return self._metrics.version + self.throughput.version + self._gpus.version

    def available_names(self) -> set[str]:
        """Return the name of every curve that can be requested."""
        named = self._metrics.keys() | self._stored_names
        if not named:
            return set()
        total = {THROUGHPUT} if self.throughput.keys() else set()
        if self.hides_step_loss:
            named = named - {TRAIN_LOSS}
        return named | (STEP_CURVES.keys() - {TRAIN_LOSS}) | total | self._gpu_names

    def requested(self) -> dict[str, Curve]:
        """Return the curves that the screen requested."""
        names = self._requested_names()
        curves = self._metrics.curves({name for name in names if not is_gpu_curve(name)})
        curves |= self._gpus.curves({name for name in names if is_gpu_curve(name)})
        if THROUGHPUT in names:
            curves |= {THROUGHPUT: self.throughput.curves()[None]}
        return curves

    def _requested_names(self) -> set[str]:
        chosen, names = self._requests.request.names, self.available_names()
        # The default choice is made among the metrics: throughput has a panel of its own.
        metrics = {name for name in names if name != THROUGHPUT and not is_gpu_curve(name)}
        requested = {*(default_choice(metrics) if chosen is None else chosen), *ALWAYS_SHOWN}
        if not self.throughput.keys():  # the panel of the throughput shows steps instead
            requested.add(STEP_SECONDS)
        return requested & names

    # -- the store -------------------------------------------------------------------------------

    def load(self, store: RunStore) -> None:
        """Load the whole stored history again."""
        self._stored_names = set(store.metric_names())
        self.throughput.load(stored_rates(store))
        if not self._stored_names and len(stored_curve(store, STEP_SECONDS)):
            self._stored_names.add(STEP_SECONDS)  # a program that logs nothing still has steps
        self._loaded = set()
        self._read(store, self._requested_names())
        self._detailed = (frozenset(), None)

    def is_complete(self) -> bool:
        """Return whether everything that the screen requests is loaded."""
        names = frozenset(self._requested_names())
        self._keep(names)
        detail = (names, self._requests.request.steps)
        return names <= self._loaded and (
            detail == self._detailed or detail[1] == self._detailed[1] is None
        )

    def load_requested(self, store: RunStore) -> None:
        """Load what the screen requests beyond what is loaded: other curves, a part in detail."""
        names, steps = frozenset(self._requested_names()), self._requests.request.steps
        self._detailed = (names, steps)
        self._read(store, names - self._loaded)
        parts = {}
        if steps is not None:
            stored = (name for name in names if name != THROUGHPUT and not is_gpu_curve(name))
            parts = {name: stored_segment(store, name, steps) for name in stored}
        self._metrics.load_detail(parts)
        self.throughput.load_detail(stored_rates(store, steps) if steps else {})

    def _read(self, store: RunStore, names: set[str] | frozenset[str]) -> None:
        gpus = {name for name in names if is_gpu_curve(name)}
        metrics = names - gpus - {THROUGHPUT}
        self._metrics.load({name: stored_curve(store, name) for name in metrics})
        if gpus:
            self._gpus.read(store, gpus, stored_curve(store, "step/seconds"))
        self._loaded |= names

    def _keep(self, names: frozenset[str]) -> None:
        """Drop the curves that were requested least recently, if there are too many."""
        for name in names:
            self._kept.pop(name, None)
            self._kept[name] = None
        most = max(MAX_KEPT, len(names))
        dropped = list(self._kept)[: max(0, len(self._kept) - most)]
        for name in dropped:
            del self._kept[name]
        self._loaded.difference_update(dropped)
        self._gpus.forget([name for name in dropped if is_gpu_curve(name)])
        self._metrics.keep_whole(frozenset(self._kept))

    # -- what ranks and the supervisor send --------------------------------------------------------

    def forget_live(self, *, throughput: bool = True) -> None:
        """Drop the live points, because a new attempt began or records were missed."""
        self._metrics.forget_live()
        if throughput:
            self.throughput.forget_live()

    def add_gpus(self, gpus: Sequence[GpuSnapshot], step: int | None, epoch: int | None) -> None:
        """Add readings of GPUs at a step; before the first step they belong to no curve."""
        self._gpu_names = frozenset(gpu_curve_names(gpus))
        if step is not None:
            self._gpus.add(gpus, float(step), float(epoch or 0))

    def add_records(self, records: Any) -> None:
        """Add what rank 0 sent."""
        _, rows = step_rows(records)
        if len(rows):
            self._metrics.add_steps(rows)
        for record in records:
            if record.kind != RecordKind.METRICS:
                continue
            row = logged_row(record)
            if row is None or row.step is None or row.t is None:
                continue
            epoch = math.nan if row.epoch is None else float(row.epoch)
            for name, value in zip(row.names, row.mean, strict=False):
                self._metrics.add(name, float(row.step), epoch, row.t, value)
