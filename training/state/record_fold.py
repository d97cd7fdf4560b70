"""The pure fold: what the ranks' queues said, record after record, as one frozen value.

``fold_many(state, polls)`` returns a new ``FoldState`` and does not change the old one. The
supervisor and the dashboard both fold; the modules beside this one and the judge read the result.
The fold reads no clock: times are those in the records (CLOCK_MONOTONIC, nanoseconds).

Windows are differences of running totals: a ``RunningTotals`` is kept every quarter of a second, so
a rank needs a few kilobytes however fast it steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from ltui.training.state.freeze_warnings import add_warnings
from ltui.training.state.run_snapshot import FreezeWarning, MetricValue
from ltui.training.tensor_queue.record_types import RecordKind, StepField

RECENT_STEPS = 32
"""Step times and losses kept of each rank."""
EVENTS_KEPT = 256
EPOCHS_KEPT = 8
TOTALS_SPACING_NS = 250_000_000
_MARKS_KEPT = 48
_MARKS_MOST = 96
METRIC_RANKS = 8
"""Metrics are folded for ranks below this one; the store keeps those of every rank."""
WINDOW_S = 10.0
"""Seconds of training steps that a throughput figure covers (see ``throughput.py``)."""
MIN_WINDOW_S = 1.0
"""Shorter windows give no figure."""
_STEP_WIDTH = len(StepField)


class RecordLike(Protocol):
    """What the fold needs of ``queue/reader.py``'s ``Record``."""

    @property
    def kind(self) -> int: ...
    @property
    def t_ns(self) -> int: ...
    @property
    def label(self) -> bytes: ...
    @property
    def array(self) -> Any: ...


class PollLike(Protocol):
    @property
    def records(self) -> Sequence[RecordLike]: ...
    @property
    def missed(self) -> int: ...


class RunningTotals(NamedTuple):
    """A rank's running totals when a batch ended. Times but ``t_ns`` are in seconds."""

    t_ns: int
    global_step: float
    batches: float
    samples: float
    timed_s: float
    """Sum of the step times of batches whose step time is known."""
    fetch_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    pauses_s: float
    """Time between epochs: validation, checkpoints, starting workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedEvent:
    """One EVENT record of a rank."""

    rank: int
    t_ns: int
    kind: str
    text: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFold:
    """What one rank's queue said so far. Never changed in place."""

    rank: int
    hello: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    totals: RunningTotals | None = None
    """Totals after the last batch; None before the first."""
    recent_totals: tuple[RunningTotals, ...] = ()
    epoch: int | None = None
    batch: int | None = None
    global_step: int | None = None
    wall_s: float | None = None
    """Unix time of the last batch's end."""
    lr: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    recent_step_s: tuple[float, ...] = ()
    recent_loss: tuple[float, ...] = ()
    """Oldest first; NaN where a batch had none."""
    loss: MetricValue | None = None
    """Of the STEP rows; None until a batch carried one."""
    bad_loss: int = 0
    """Batches in a row, up to the last, whose loss is not finite though an earlier one was."""
    bad_loss_step: int | None = None
    bad_loss_wall_s: float | None = None
    epoch_batches: Mapping[int, int] = field(default_factory=dict)
    """Epoch -> batches done in it, of the last epochs."""
    between_epochs_s: float | None = None
    """How much longer than a step the last change of epoch took."""
    samples_per_s: float | None = None
    """Over the window that ends with the last batch; None while the window is too short."""
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    missed: int = 0
    telemetry_error: str | None = None
    steering_error: str | None = None
    """Why the rank can't stop with a checkpoint, pause or save."""
    exception: FoldedEvent | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldState:
    """All ranks of one attempt."""

    ranks: Mapping[int, RankFold] = field(default_factory=dict)
    events: tuple[FoldedEvent, ...] = ()
    """The last ``EVENTS_KEPT``, in the order folded."""
    events_seen: int = 0
    warnings: tuple[FreezeWarning, ...] = ()
    """Events of the kind ``warning``, each text once."""
    best_samples_per_s: float | None = None

    @property
    def lowest_active_rank(self) -> RankFold | None:
        """The lowest rank that completed a batch, else the lowest one heard of."""
        stepped = [r for r, f in self.ranks.items() if f.totals is not None]
        chosen = min(stepped or self.ranks, default=None)
        return None if chosen is None else self.ranks[chosen]


def fold(state: FoldState, rank: int, records: Sequence[RecordLike], missed: int = 0) -> FoldState:
    """``state`` with one rank's new records. For many ranks at once use ``fold_many``."""
    return _fold(state, ((rank, records, missed),))


def fold_many(state: FoldState, polls: Mapping[int, PollLike]) -> FoldState:
    """``state`` with what each rank's queue gave since the last tick."""
    return _fold(state, ((rank, poll.records, poll.missed) for rank, poll in polls.items()))


def _fold(state: FoldState, batches: Iterable[tuple[int, Sequence[RecordLike], int]]) -> FoldState:
    ranks: dict[int, RankFold] | None = None
    events: list[FoldedEvent] = []
    for rank, records, missed in batches:
        if not records and not missed:
            continue
        if ranks is None:
            ranks = dict(state.ranks)
        ranks[rank] = _fold_rank(ranks.get(rank) or RankFold(rank=rank), records, missed, events)
    if ranks is None:
        return state
    return FoldState(
        ranks=ranks,
        events=(*state.events, *events)[-EVENTS_KEPT:],
        events_seen=state.events_seen + len(events),
        warnings=add_warnings(state.warnings, events),
        best_samples_per_s=_best(state.best_samples_per_s, ranks),
    )


def _best(best: float | None, ranks: Mapping[int, RankFold]) -> float | None:
    """The best total so far. A total counts once every rank that steps has a full window."""
    total = 0.0
    for rank in ranks.values():
        if rank.totals is None:
            continue
        if rank.samples_per_s is None:
            return best
        total += rank.samples_per_s
    return best if total <= (best or 0.0) else total


def _fold_rank(
    rank: RankFold, records: Sequence[RecordLike], missed: int, events: list[FoldedEvent]
) -> RankFold:
    changes: dict[str, Any] = {}
    if missed:
        changes["missed"] = rank.missed + missed
    steps = [r for r in records if r.kind == RecordKind.STEP]
    if len(steps) < len(records):
        _fold_labels(rank, [r for r in records if r.kind != RecordKind.STEP], changes, events)
    if steps:
        times, rows = step_rows(steps)
        _fold_steps(rank, times, rows, changes)
    return replace(rank, **changes) if changes else rank


def step_rows(records: Iterable[RecordLike]) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Times and float64 rows ``(n, len(StepField))`` of the STEP records among ``records``.

    Rows of an older or newer layout are padded with NaN or cut.
    """
    steps = [(r.t_ns, r.array) for r in records if r.kind == RecordKind.STEP]
    times = [t for t, _ in steps]
    if not steps:
        return times, np.empty((0, _STEP_WIDTH))
    arrays = [a for _, a in steps]
    if all(a.size == _STEP_WIDTH for a in arrays):
        return times, np.concatenate(arrays).reshape(-1, _STEP_WIDTH)
    rows = np.full((len(arrays), _STEP_WIDTH), math.nan)
    for row, values in zip(rows, arrays, strict=True):
        n = min(values.size, _STEP_WIDTH)
        row[:n] = np.asarray(values, dtype=np.float64).reshape(-1)[:n]
    return times, rows


def _fold_steps(
    rank: RankFold, times: list[int], rows: np.ndarray[Any, Any], changes: dict[str, Any]
) -> None:
    total = rank.totals
    marks = list(rank.recent_totals)
    step_times = list(rank.recent_step_s)
    epoch, gap_s = rank.epoch, rank.between_epochs_s
    # One pass over plain floats: for the handful of rows of a tick that is cheaper than a NumPy
    # call for each column, and a backlog of 20,000 rows still takes some tens of milliseconds.
    for t_ns, row in zip(times, rows.tolist(), strict=True):
        step_s, row_epoch = row[6], _whole(row[1])
        elapsed = (t_ns - total.t_ns) / 1e9 if total else None
        new_epoch = total is not None and row_epoch is not None and row_epoch != epoch
        pause = 0.0
        if new_epoch and elapsed is not None:
            usual = _usual(step_times)
            pause = max(0.0, elapsed - (usual or 0.0))
            gap_s = pause
        total = _add(total, t_ns, row, pause)
        if not marks or t_ns - marks[-1].t_ns >= TOTALS_SPACING_NS:
            marks.append(total)
        if row_epoch is not None:
            epoch = row_epoch
        if not new_epoch:
            if step_s == step_s:
                step_times.append(step_s)
            elif elapsed is not None:
                step_times.append(elapsed)
    if len(marks) > _MARKS_MOST:
        marks = marks[-_MARKS_KEPT:]
    last = rows[-1].tolist()
    _fold_epochs(rank, rows, changes)
    changes.update(
        totals=total,
        recent_totals=tuple(marks),
        epoch=epoch,
        batch=_latest(last[StepField.BATCH], rank.batch),
        global_step=_latest(last[StepField.GLOBAL_STEP], rank.global_step),
        wall_s=_finite(last[StepField.WALL_S]) or rank.wall_s,
        lr=_finite(last[StepField.LR]),
        memory_bytes=_whole(last[StepField.MEMORY_BYTES]),
        memory_peak_bytes=_whole(last[StepField.MEMORY_PEAK_BYTES]),
        recent_step_s=tuple(step_times[-RECENT_STEPS:]),
        between_epochs_s=gap_s,
        samples_per_s=_rate(marks, total),
    )
    _fold_losses(rank, rows, changes)


def _fold_epochs(rank: RankFold, rows: np.ndarray[Any, Any], changes: dict[str, Any]) -> None:
    """How many batches each epoch had: the last batch seen of it, and one."""
    epochs = dict(rank.epoch_batches)
    for row in (rows[i] for i in _last_of_epochs(rows[:, StepField.EPOCH])):
        epoch, batch = _whole(float(row[StepField.EPOCH])), _whole(float(row[StepField.BATCH]))
        if epoch is not None and batch is not None:
            epochs[epoch] = batch + 1
    changes["epoch_batches"] = dict(sorted(epochs.items())[-EPOCHS_KEPT:])


def _last_of_epochs(epochs: np.ndarray[Any, Any]) -> list[int]:
    """Where the epoch changes after a row, and the last row."""
    return [*np.flatnonzero(epochs[1:] != epochs[:-1]).tolist(), len(epochs) - 1]


def _add(total: RunningTotals | None, t_ns: int, row: list[float], pause_s: float) -> RunningTotals:
    """Running totals with one more batch. What is not known (NaN) adds nothing."""
    step, batches, samples, timed, fetch, forward, backward, optimizer, pauses = (
        total[1:] if total else (0.0,) * 9
    )
    if row[0] == row[0]:
        step = row[0]
    step_s = row[6]
    if step_s == step_s:
        timed += step_s
        # Samples too: a rate is of the steps whose length is known.
        samples += row[3] if row[3] == row[3] else 0.0
        # Shares are of the steps whose length is known, so parts count only beside a whole.
        fetch += row[7] if row[7] == row[7] else 0.0
        forward += row[8] if row[8] == row[8] else 0.0
        backward += row[9] if row[9] == row[9] else 0.0
        optimizer += row[10] if row[10] == row[10] else 0.0
    pauses += pause_s
    return RunningTotals(
        t_ns, step, batches + 1, samples, timed, fetch, forward, backward, optimizer, pauses
    )


def window_start(marks: Sequence[RunningTotals], total: RunningTotals) -> RunningTotals | None:
    """Where the window of throughput begins that ends at ``totals``; None while it is too short."""
    begin = next((m for m in marks if total.timed_s - m.timed_s <= WINDOW_S), None)
    if begin is None or begin.batches == total.batches:
        begin = marks[-4] if len(marks) >= 4 else marks[0]
    return begin if total.timed_s - begin.timed_s >= MIN_WINDOW_S else None


def _rate(marks: Sequence[RunningTotals], total: RunningTotals | None) -> float | None:
    """Samples a second of the window that ends with the last batch."""
    begin = window_start(marks, total) if total is not None and marks else None
    if total is None or begin is None or total.samples <= begin.samples:
        return None
    return (total.samples - begin.samples) / (total.timed_s - begin.timed_s)


def _fold_losses(rank: RankFold, rows: np.ndarray[Any, Any], changes: dict[str, Any]) -> None:
    losses = rows[:, StepField.LOSS]
    tail = losses[-RECENT_STEPS:].tolist()
    changes["recent_loss"] = (*rank.recent_loss, *tail)[-RECENT_STEPS:]
    finite = np.isfinite(losses)
    ok = int(finite.sum())
    if not ok and rank.loss is None and not np.isinf(losses).any():
        return  # the script's training_step returns no loss
    bad = _trailing(finite)
    changes["bad_loss"] = rank.bad_loss + bad if bad == len(losses) else bad
    if bad and not (rank.bad_loss and bad == len(losses)):
        first = rows[len(losses) - bad].tolist()
        changes["bad_loss_step"] = _whole(first[StepField.GLOBAL_STEP])
        changes["bad_loss_wall_s"] = _finite(first[StepField.WALL_S])
    elif not bad:
        changes["bad_loss_step"] = changes["bad_loss_wall_s"] = None
    step = _latest(float(rows[-1, StepField.GLOBAL_STEP]), rank.global_step) or 0
    low = float(losses[finite].min()) if ok else None
    high = float(losses[finite].max()) if ok else None
    changes["loss"] = _extend(rank.loss, float(losses[-1]), step, low, high)


def _trailing(finite: np.ndarray[Any, Any]) -> int:
    """How many values at the end are not finite."""
    good = np.flatnonzero(finite)
    return len(finite) - (int(good[-1]) + 1 if len(good) else 0)


def _extend(
    old: MetricValue | None, last: float, step: int, low: float | None, high: float | None
) -> MetricValue:
    lows = [v for v in (low, old.best_min if old else None) if v is not None]
    highs = [v for v in (high, old.best_max if old else None) if v is not None]
    return MetricValue(
        last=last,
        step=step,
        best_min=min(lows, default=None),
        best_max=max(highs, default=None),
    )


def _fold_labels(
    rank: RankFold,
    records: Sequence[RecordLike],
    changes: dict[str, Any],
    events: list[FoldedEvent],
) -> None:
    metrics: dict[str, MetricValue] | None = None
    for record in records:
        if record.kind == RecordKind.METRICS:
            if rank.rank < METRIC_RANKS:
                metrics = dict(rank.metrics) if metrics is None else metrics
                _fold_metrics(metrics, record)
            continue
        label = _label(record)
        if label is None:
            continue
        if record.kind == RecordKind.HELLO:
            changes["hello"] = label
        elif record.kind == RecordKind.PLAN:
            changes["plan"] = label
        elif record.kind == RecordKind.EVENT:
            event = _event(rank.rank, record.t_ns, label)
            events.append(event)
            if event.kind == "exception":
                changes["exception"] = event
            elif event.kind == "telemetry_off":
                changes["telemetry_error"] = str(label.get("error") or event.text or "unknown")
            elif event.kind == "steering_off":
                changes["steering_error"] = str(label.get("error") or event.text or "unknown")
    if metrics is not None:
        changes["metrics"] = metrics


def _event(rank: int, t_ns: int, label: Mapping[str, Any]) -> FoldedEvent:
    kind, text = str(label.get("kind", "note")), str(label.get("text", ""))
    return FoldedEvent(rank=rank, t_ns=t_ns, kind=kind, text=text, fields=label)


def _fold_metrics(metrics: dict[str, MetricValue], record: RecordLike) -> None:
    label = _label(record)
    names = label.get("names") if label else None
    if label is None or not isinstance(names, list):
        return
    step = _whole(label.get("step")) or 0
    values = np.asarray(record.array, dtype=np.float64).reshape(-1).tolist()
    for name, value in zip(names, values, strict=False):
        bound = value if math.isfinite(value) else None
        metrics[str(name)] = _extend(metrics.get(str(name)), value, step, bound, bound)


def _label(record: RecordLike) -> Mapping[str, Any] | None:
    """The label's JSON object; None where it is something else (a writer of another version)."""
    try:
        value = json.loads(record.label)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _usual(step_times: Sequence[float]) -> float | None:
    return median(step_times[-8:]) if step_times else None


def _latest(value: float, old: int | None) -> int | None:
    return old if (whole := _whole(value)) is None else whole


def _whole(value: Any) -> int | None:
    finite = _finite(value)
    return None if finite is None else int(finite)


def _finite(value: Any) -> float | None:
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None
