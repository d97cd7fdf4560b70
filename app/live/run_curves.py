"""The curves of one run that its screens request: metrics, throughput and readings of GPUs.

They are read from the store when a screen requests them, and continued with the rows that the
supervisor has written since. Readings of GPUs are curves over the steps of the run, so that they
are metrics like any other. There is no thread and no clock here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np
from msgspec import Struct

from ltui.app.live.curve_arithmetic import (
    STEP_CURVES,
    STEP_SECONDS,
    LatestCurveRequest,
    concatenate,
    default_choice,
    empty_curve,
    splice,
)
from ltui.training.state.metric_name_patterns import (
    MAX_RANK_RATES,
    THROUGHPUT,
    TOTAL_RANK,
    TRAIN_LOSS,
)
from ltui.training.state.run_snapshot import GpuSnapshot, RunSnapshot
from ltui.training.store.curve_reader import Curve, FloatArray, merge_points, to_curve
from ltui.training.store.history_reader import CurveEnd, RunStore

GIB = float(1 << 30)
STORED_S = 6 * 3600.0
"""Seconds of stored readings that a curve begins with; the store keeps no more."""
GPU_POINTS = 2000
"""Maximum number of points that stored readings are merged into."""
_READINGS = {
    "utilisation_percent": ("utilisation_percent", 1.0),
    "memory_gib": ("memory_used_bytes", 1 / GIB),
    "power_w": ("power_w", 1.0),
    "temperature_c": ("temperature_c", 1.0),
}
"""Last part of a curve's name -> field of a reading, and the factor of its values."""
_NAME = re.compile(r"gpu/(\d+)/(\w+)")


def gpu_curve_names(gpus: Sequence[GpuSnapshot]) -> list[str]:
    """Return the names of all curves of these GPUs: ``gpu/0/power_w``."""
    return [f"gpu/{gpu.number}/{reading}" for gpu in gpus for reading in _READINGS]


def is_gpu_curve(name: str) -> bool:
    """Return whether a name is that of a GPU's curve, not of a logged metric."""
    match = _NAME.fullmatch(name)
    return match is not None and match[2] in _READINGS


class GpuCurves:
    """The requested curves of GPUs: stored readings, then those of each new snapshot."""

    def __init__(self) -> None:
        self.version = 0
        """Changes when a curve changes."""
        self._curves: dict[str, Curve] = {}
        self._last_at: dict[int, float] = {}

    def curves(self) -> dict[str, Curve]:
        """Return the loaded curves by name."""
        return dict(self._curves)

    def add(self, gpus: Sequence[GpuSnapshot], step: float, epoch: float) -> None:
        """Add the newest readings, taken at this step. Readings that were added are skipped."""
        for gpu in gpus:
            at = gpu.sampled_at
            if at is None or gpu.error is not None or at <= self._last_at.get(gpu.number, 0.0):
                continue
            self._last_at[gpu.number] = at
            for reading, (field, factor) in _READINGS.items():
                name, value = f"gpu/{gpu.number}/{reading}", getattr(gpu, field)
                if value is None or name not in self._curves:
                    continue
                value *= factor
                point = to_curve([(step, epoch, at, value, value, value, 1)])
                curve = concatenate([self._curves[name], point])
                if len(curve) > 2 * GPU_POINTS:
                    curve = merge_points(curve, GPU_POINTS)
                self._curves[name] = curve
                self.version += 1

    def read(self, store: RunStore, names: Collection[str], training: Curve) -> None:
        """Load stored readings. ``training`` gives the step and the epoch of each time."""
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            readings = store.gpu_history(int(match[1]), STORED_S)
            field, factor = _READINGS[match[2]]
            self._curves[name] = _over_steps(readings["t"], factor * readings[field], training)
            self.version += 1

    def forget(self, names: Collection[str]) -> None:
        """Drop these curves."""
        for name in names:
            self._curves.pop(name, None)


def _over_steps(times: FloatArray, values: FloatArray, training: Curve) -> Curve:
    finite = np.isfinite(training.times)
    if not len(times) or not finite.any():
        return empty_curve()
    order = np.argsort(training.times[finite], kind="stable")
    known, steps = training.times[finite][order], training.steps[finite][order]
    epochs = training.epochs[finite][order]
    # Several readings may belong to one step, as during a validation.
    at = np.maximum.accumulate(np.interp(times, known, steps))
    curve = Curve(
        at, np.interp(times, known, epochs), times, values, values, values, np.ones(len(times))
    )
    return merge_points(curve, GPU_POINTS)


TAIL_STEPS = 2048
"""Number of steps at the end of a curve that are read one by one. The end of the smoothed curve
is then the same as if all steps were read."""


def stored_curve(store: RunStore, name: str, rank: int = 0) -> Curve:
    """Return a whole curve of one rank, with its end at full resolution."""
    curve = store.curve(name, rank=rank)
    if not len(curve) or float(curve.count.max()) <= 1:
        return curve
    first = int(curve.steps[-1]) - TAIL_STEPS
    return splice(curve, store.curve(name, rank=rank, first_step=first, max_points=4 * TAIL_STEPS))


def stored_segment(store: RunStore, name: str, steps: tuple[int, int], rank: int = 0) -> Curve:
    """Return the part of a curve between two steps, in as much detail as the store has."""
    return store.curve(name, rank=rank, first_step=steps[0], last_step=steps[1])


def stored_attempt_ranks(store: RunStore) -> tuple[tuple[int, int], ...]:
    """Return first step and number of ranks of each attempt whose steps count."""
    first_steps = {attempt.number: attempt.resumed_step or 0 for attempt in store.attempts()}
    return tuple(
        (first_steps.get(attempt, 0), len(ranks))
        for attempt, ranks in store.attempt_ranks().items()
        if ranks
    )


ALWAYS_SHOWN = ("step/lr",)
"""Curves that every frame holds although no chart shows them: the details show their newest
value."""
MAX_KEPT = 64
"""Maximum number of curves that stay in memory, those that were requested last."""
MAX_POINTS = 16_384
"""Number of points from which on a curve is read again, so that its older points are merged."""
REREAD_S = 5.0
"""Seconds between two complete reads of a curve whose steps go back."""

Key = tuple[str, int]
"""Name and rank of a curve."""


class _LoadedCurve(Struct):
    """A curve until ``end``, the newest row that was read."""

    curve: Curve
    end: CurveEnd
    read_at: float
    """Unix seconds when the curve was read completely."""
    position: tuple[int, int] | None
    """What ``RunStore.queue_position`` returned at the last look-up."""
    detail: Curve | None = None
    """The visible part, if only a part is visible."""

    def shown(self) -> Curve:
        return self.curve if self.detail is None else splice(self.curve, self.detail)


class RunCurves:
    """The loaded curves of a run."""

    def __init__(self, requests: LatestCurveRequest) -> None:
        self._requests = requests
        self._gpus = GpuCurves()
        self._loaded: dict[Key, _LoadedCurve] = {}
        """The curve that was requested last comes last."""
        self._version = 0
        self._returned: frozenset[str] = frozenset()
        self._attempt = 1
        self._metric_steps: dict[str, int | None] = {}
        """The metrics of the newest snapshot, and the step of each value."""
        self._hides_step_loss = False
        """The program logs the loss of each step itself, so ``train/loss`` is not shown."""
        self._gpu_names: frozenset[str] = frozenset()
        self._stored_names: set[str] = set()
        self._rate_ranks: frozenset[int] = frozenset()
        self._detail_steps: tuple[int, int] | None = None
        self._named: set[str] = set()
        self._default: tuple[str, ...] = ()
        """The default choice among the names ``_named``."""

    @property
    def version(self) -> int:
        """Changes when a requested curve changes."""
        return self._version + self._gpus.version

    def available_names(self) -> set[str]:
        """Return the name of every curve that can be requested."""
        named = self._metric_steps.keys() | self._stored_names
        if not named:
            return set()
        measured = self._loaded.get((THROUGHPUT, TOTAL_RANK))
        total = {THROUGHPUT} if measured is not None and len(measured.curve) else set()
        if self._hides_step_loss:
            named = named - {TRAIN_LOSS}
        return named | (STEP_CURVES - {TRAIN_LOSS}) | total | self._gpu_names

    def requested(self) -> dict[str, Curve]:
        """Return the curves that the screen requested."""
        names = frozenset(self._requested_names())
        if names != self._returned:
            self._returned = names
            self._version += 1
        curves = {name: curve for name, curve in self._gpus.curves().items() if name in names}
        for name in names:
            loaded = self._loaded.get((name, TOTAL_RANK if name == THROUGHPUT else 0))
            if loaded is not None:
                curves[name] = loaded.shown()
        return curves

    def rates(self) -> dict[int | None, Curve]:
        """Return the throughput of each rank, and of all ranks under the key None."""
        return {
            None if rank == TOTAL_RANK else rank: loaded.shown()
            for (name, rank), loaded in self._loaded.items()
            if name == THROUGHPUT and len(loaded.curve)
        }

    def _requested_names(self) -> set[str]:
        chosen, names = self._requests.request.names, self.available_names()
        if chosen is None and names != self._named:
            # Only among the metrics, because throughput has a panel of its own.
            metrics = {name for name in names if name != THROUGHPUT and not is_gpu_curve(name)}
            self._named, self._default = names, default_choice(metrics)
        requested = {*(self._default if chosen is None else chosen), *ALWAYS_SHOWN}
        if THROUGHPUT not in names:  # the panel of the throughput shows steps instead
            requested.add(STEP_SECONDS)
        return requested & names

    def _requested_keys(self) -> list[Key]:
        """Return what to read from the store: the throughput always, GPUs apart."""
        ranks = sorted(self._rate_ranks) if 1 < len(self._rate_ranks) <= MAX_RANK_RATES else []
        names = (n for n in self._requested_names() if n != THROUGHPUT and not is_gpu_curve(n))
        return [(THROUGHPUT, rank) for rank in (TOTAL_RANK, *ranks)] + [(n, 0) for n in names]

    # -- the store -------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop everything that was read, because a new attempt began or the run has ended."""
        self._loaded.clear()
        self._gpus.forget(self._gpus.curves())
        self._stored_names = set()
        self._version += 1

    def is_complete(self) -> bool:
        """Return whether everything that the screen requests was read once."""
        gpus = {name for name in self._requested_names() if is_gpu_curve(name)}
        return (
            self._loaded.keys() >= set(self._requested_keys())
            and gpus <= self._gpus.curves().keys()
            and self._detail_steps == self._requests.request.steps
            and (self._detail_steps is None or not self._without_detail())
        )

    def read(self, store: RunStore, now: float) -> None:
        """Read what the screen requests: whole curves if they are new, else their new points."""
        with store.one_state():
            position = store.queue_position(self._attempt)
            before = (loaded.position for loaded in self._loaded.values())
            # With another queue of rank 0 than before, its steps begin again.
            if position is not None and any(b is not None and b[1] != position[1] for b in before):
                self.forget()
            if not self._stored_names:
                self._read_names(store)
            for key in self._requested_keys():
                self._continue(store, key, position, now)
            self._read_gpus(store)
            self._read_detail(store)
        self._drop_old()

    def _read_names(self, store: RunStore) -> None:
        self._stored_names = set(store.metric_names())
        self._rate_ranks |= {
            rank for ranks in store.attempt_ranks().values() for rank in ranks[: MAX_RANK_RATES + 1]
        }
        if not self._stored_names and store.curve_end(STEP_SECONDS, 0, self._attempt).step >= 0:
            self._stored_names.add(STEP_SECONDS)  # a program that logs nothing still has steps

    def _continue(
        self, store: RunStore, key: Key, position: tuple[int, int] | None, now: float
    ) -> None:
        """Append the new points of a curve, or read it completely."""
        loaded = self._loaded.pop(key, None)
        if loaded is not None:
            self._loaded[key] = loaded
            if loaded.position == position or self._append(store, key, loaded, now):
                loaded.position = position
                return
        self._loaded[key] = _LoadedCurve(
            stored_curve(store, *key), store.curve_end(*key, self._attempt), now, position
        )
        self._version += 1

    def _append(self, store: RunStore, key: Key, loaded: _LoadedCurve, now: float) -> bool:
        """Append new points. Return False if the curve has to be read completely instead."""
        new = store.new_points(*key, loaded.end)
        if new is None:
            return False
        points, end = new
        if not len(points):
            newest = self._metric_steps.get(key[0])
            went_back = newest is not None and newest < end.step
            return not went_back or 0 <= now - loaded.read_at < REREAD_S
        if len(loaded.curve):
            # A new attempt begins before the last steps of the previous one.
            overlap = loaded.curve.steps[-1] - points.steps[0]
            if overlap > 0 or (overlap == 0 and loaded.end.step < 0):
                return False
        loaded.curve, loaded.end = concatenate([loaded.curve, points]), end
        self._version += 1
        return len(loaded.curve) <= MAX_POINTS

    def _read_gpus(self, store: RunStore) -> None:
        names = {name for name in self._requested_names() if is_gpu_curve(name)}
        if missing := names - self._gpus.curves().keys():
            self._gpus.read(store, missing, stored_curve(store, STEP_SECONDS))

    def _without_detail(self) -> list[Key]:
        return [key for key in self._requested_keys() if self._loaded[key].detail is None]

    def _read_detail(self, store: RunStore) -> None:
        """Read the visible part in as much detail as the store has."""
        steps = self._requests.request.steps
        if steps != self._detail_steps:
            self._detail_steps = steps
            for loaded in self._loaded.values():
                loaded.detail = None
            self._version += 1
        if steps is not None:
            for name, rank in self._without_detail():
                self._loaded[name, rank].detail = stored_segment(store, name, steps, rank)
                self._version += 1

    def _drop_old(self) -> None:
        """Drop the curves that were requested least recently, if there are too many."""
        most = max(MAX_KEPT, len(self._requested_keys()))
        for key in list(self._loaded)[: max(0, len(self._loaded) - most)]:
            del self._loaded[key]
        self._gpus.forget(list(self._gpus.curves())[: max(0, len(self._gpus.curves()) - most)])

    # -- the supervisor --------------------------------------------------------------------------

    def use_snapshot(self, snapshot: RunSnapshot) -> None:
        """Take over the names of the metrics, and the readings of the GPUs."""
        self._attempt = snapshot.attempt
        self._metric_steps = {name: value.step for name, value in snapshot.metrics.items()}
        self._hides_step_loss = bool(snapshot.metrics) and TRAIN_LOSS not in snapshot.metrics
        self._rate_ranks |= {rank.rank for rank in snapshot.ranks[: MAX_RANK_RATES + 1]}
        self._gpu_names = frozenset(gpu_curve_names(snapshot.gpus))
        # Before the first step readings belong to no curve.
        if snapshot.global_step is not None:
            self._gpus.add(snapshot.gpus, float(snapshot.global_step), float(snapshot.epoch or 0))
