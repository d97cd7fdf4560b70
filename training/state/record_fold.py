"""Reduction (fold) of the records in the ranks' queues to one frozen value. Pure.

``fold_many(state, polls)`` returns a new ``FoldState`` and does not change the old one. Only the
supervisor folds; other modules of this package and the judge read the result.
The fold reads no clock: times are those in the records (CLOCK_MONOTONIC, nanoseconds).

Windows are differences of running totals: a ``RunningTotals`` is kept every quarter of a second, so
a rank needs a few kilobytes however fast it steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.shared.record_types import RecordKind, StepField
from ltui.training.state.freeze_checks import add_warnings
from ltui.training.state.metric_name_patterns import (
    METRIC_RANKS,
    TRAIN_LOSS_ALIASES,
    is_training_loss,
)
from ltui.training.state.run_snapshot import FreezeWarning, MetricValue
from ltui.training.tensor_queue.queue_reader import Poll, Record

RECENT_STEPS = 32
"""Number of step times and losses kept for each rank."""
EVENTS_KEPT = 256
"""Number of events kept for all ranks together."""
EPOCHS_KEPT = 8
"""Number of epochs for which each rank's batch counts are kept."""
TOTALS_SPACING_NS = 250_000_000
"""Least nanoseconds between two running totals that are kept."""
_TOTALS_KEPT, _TOTALS_MAX = 48, 96
"""Running totals that are kept when there are more than the maximum."""
WINDOW_S = 10.0
"""Seconds of training steps that a throughput figure covers (see ``snapshot_from_fold.py``)."""
MIN_WINDOW_S = 1.0
"""Seconds below which a window gives no throughput figure."""
_ERRORS = {"telemetry_off": "telemetry_error", "steering_off": "steering_error"}
"""kind of event -> field of ``RankFold`` that holds its reason."""
_STEP_WIDTH = len(StepField)
_GLOBAL_STEP, _EPOCH, _SAMPLES, _STEP_S = (
    int(field)
    for field in (StepField.GLOBAL_STEP, StepField.EPOCH, StepField.SAMPLES, StepField.STEP_S)
)
_FETCH_S, _FORWARD_S, _BACKWARD_S, _OPTIMIZER_S = (
    int(field)
    for field in (
        StepField.FETCH_S, StepField.FORWARD_S, StepField.BACKWARD_S, StepField.OPTIMIZER_S,
    )
)  # fmt: skip


class RunningTotals(NamedTuple):
    """Totals of a rank at the end of a batch. All times except ``t_ns`` are in seconds."""

    t_ns: int
    global_step: float
    batches: float
    samples: float
    timed_s: float
    """Sum of the step times that are known."""
    fetch_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    pauses_s: float
    """Time between epochs: validation, checkpoints, start of DataLoader workers."""


class Window(Struct, frozen=True):
    """Batches of one rank between ``begin`` and ``end``; their steps took ``seconds``."""

    begin: RunningTotals
    end: RunningTotals
    seconds: float

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second; None if the sizes of the batches are unknown."""
        samples = self.end.samples - self.begin.samples
        return samples / self.seconds if samples > 0 else None

    @property
    def batches(self) -> float:
        """Number of batches."""
        return self.end.batches - self.begin.batches

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps per second."""
        return max(0.0, self.end.global_step - self.begin.global_step) / self.seconds

    def fraction(self, part: str) -> float:
        """Return the fraction (0 to 1) of the step spent in ``fetch``, ``forward`` and so on."""
        spent: float = getattr(self.end, f"{part}_s") - getattr(self.begin, f"{part}_s")
        return min(1.0, max(0.0, spent / self.seconds))


class FoldedEvent(Struct, frozen=True, kw_only=True):
    """One EVENT record of a rank."""

    rank: int
    t_ns: int
    kind: str
    text: str
    fields: Mapping[str, Any]


class RankFold(Struct, frozen=True, kw_only=True):
    """Result of the fold for one rank. It is never changed in place."""

    rank: int
    hello: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    totals: RunningTotals | None = None
    """Totals after the last batch; None before the first batch."""
    recent_totals: tuple[RunningTotals, ...] = ()
    """Earlier totals, oldest first, from which windows are computed."""
    epoch: int | None = None
    batch: int | None = None
    global_step: int | None = None
    wall_s: float | None = None
    """Unix time at which the last batch ended."""
    last_step: tuple[float, ...] = ()
    """Values of ``StepField`` for the last batch; empty before the first batch."""
    recent_step_s: tuple[float, ...] = ()
    recent_loss: tuple[float, ...] = ()
    """Losses, oldest first; NaN for a batch without a loss."""
    loss: MetricValue | None = None
    """Loss in the step records; None until a batch has one."""
    bad_loss: int = 0
    """Number of consecutive batches, up to the last one, with a loss that is not finite."""
    bad_loss_step: int | None = None
    bad_loss_wall_s: float | None = None
    epoch_batches: Mapping[int, int] = field(default_factory=dict)
    """Epoch -> completed batches, for the last epochs."""
    between_epochs_s: float | None = None
    """Seconds that the last change of epoch took beyond the time of a usual step."""
    samples_per_s: float | None = None
    """Rate over the window that ends with the last batch; None while the window is too short."""
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    missed: int = 0
    """Number of records that were lost."""
    telemetry_error: str | None = None
    """Reason why the rank sends no telemetry any more."""
    steering_error: str | None = None
    """Reason why the rank cannot stop with a checkpoint, pause or save."""
    exception: FoldedEvent | None = None

    def knows(self, part: str) -> bool:
        """Return True if the rank measures the ``fetch``, ``forward``, ... of a step."""
        field = StepField[f"{part.upper()}_S"]
        return len(self.last_step) > field and not math.isnan(self.last_step[field])


class FoldState(Struct, frozen=True, kw_only=True):
    """State of the fold: all ranks of one attempt."""

    ranks: Mapping[int, RankFold] = field(default_factory=dict)
    events: tuple[FoldedEvent, ...] = ()
    """The last ``EVENTS_KEPT`` events, in the order in which they were folded."""
    events_seen: int = 0
    """Number of events so far, including those that are no longer kept."""
    warnings: tuple[FreezeWarning, ...] = ()
    """Warnings that ranks reported, each text once."""
    best_samples_per_s: float | None = None
    """Highest rate of all ranks together so far."""
    unmeasured: tuple[int, int] | None = None
    """First and last step whose times do not count, because a profiler changes them."""
    best_is_provisional: bool = True
    """True until a window of ``WINDOW_S`` is full. Until then the best rate is simply the last."""

    @property
    def saves_checkpoints(self) -> bool:
        """False if a rank has said that it cannot save what a resume needs."""
        return all((rank.hello or {}).get("saves", True) for rank in self.ranks.values())

    @property
    def program(self) -> str | None:
        """What kind of program trains, as ``PyTorch DDP``; None with Lightning's Trainer."""
        kinds = ((rank.hello or {}).get("program") for rank in self.ranks.values())
        return next((kind for kind in kinds if isinstance(kind, str)), None)

    @property
    def lowest_active_rank(self) -> RankFold | None:
        """The lowest rank that completed a batch, or else the lowest rank that sent a record."""
        active = [r for r, f in self.ranks.items() if f.totals is not None]
        lowest = min(active or self.ranks, default=None)
        return None if lowest is None else self.ranks[lowest]


def fold(state: FoldState, rank: int, records: Sequence[Record], missed: int = 0) -> FoldState:
    """Return ``state`` extended by new records of one rank; see ``fold_many`` for several ranks."""
    return fold_many(state, {rank: Poll(tuple(records), missed)})


def fold_many(state: FoldState, polls: Mapping[int, Poll]) -> FoldState:
    """Return ``state`` extended by the records that each rank's queue delivered."""
    polls = {rank: poll for rank, poll in polls.items() if poll.records or poll.missed}
    if not polls:
        return state
    ranks, events = dict(state.ranks), list[FoldedEvent]()
    for rank, poll in polls.items():
        before = ranks.get(rank) or RankFold(rank=rank)
        ranks[rank] = _fold_rank(before, poll, events, state.unmeasured)
    best, provisional = _highest_rate(state, ranks)
    return FoldState(
        ranks=ranks,
        events=(*state.events, *events)[-EVENTS_KEPT:],
        events_seen=state.events_seen + len(events),
        warnings=add_warnings(state.warnings, events),
        best_samples_per_s=best,
        unmeasured=state.unmeasured,
        best_is_provisional=provisional,
    )


def _highest_rate(state: FoldState, ranks: Mapping[int, RankFold]) -> tuple[float | None, bool]:
    """Return the highest total rate so far, and whether it is provisional.

    The rate of the first second says little. Until every rank that has completed a batch has a full
    window, the rate of all its steps takes the place of the best one, unless that is from earlier.
    """
    best = state.best_samples_per_s
    active = [(rank.samples_per_s, rank.totals) for rank in ranks.values() if rank.totals]
    rates = [rate for rate, _ in active if rate is not None]
    if not rates or len(rates) < len(active):
        return best, state.best_is_provisional
    full = all(totals.timed_s > 0.99 * WINDOW_S for _, totals in active)
    if state.best_is_provisional:
        return sum(rates), not full
    return (max(sum(rates), best or 0.0) if full else best), False


def _fold_rank(
    rank: RankFold, poll: Poll, events: list[FoldedEvent], unmeasured: tuple[int, int] | None
) -> RankFold:
    changes: dict[str, Any] = {"missed": rank.missed + poll.missed}
    steps = [r for r in poll.records if r.kind == RecordKind.STEP]
    if len(steps) < len(poll.records):
        _fold_labels(rank, [r for r in poll.records if r.kind != RecordKind.STEP], changes, events)
    if steps:
        times, rows = step_rows(steps)
        _fold_steps(rank, times, rows, changes, unmeasured)
    return replace(rank, **changes)


def step_rows(records: Iterable[Record]) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Return the times and float64 rows ``(n, len(StepField))`` of the STEP records.

    Rows of an older layout are padded with NaN, rows of a newer layout are cut.
    """
    steps = [r for r in records if r.kind == RecordKind.STEP]
    times, arrays = [r.t_ns for r in steps], list[Any](r.array for r in steps)
    if not steps:
        return times, np.empty((0, _STEP_WIDTH))
    if all(a.size == _STEP_WIDTH for a in arrays):
        rows = np.concatenate(arrays).reshape(-1, _STEP_WIDTH)
    else:
        rows = np.full((len(arrays), _STEP_WIDTH), math.nan)
        for row, values in zip(rows, arrays, strict=True):
            n = min(values.size, _STEP_WIDTH)
            row[:n] = np.asarray(values, dtype=np.float64).reshape(-1)[:n]
    if steps[0].wall_offset_s:
        rows[:, StepField.WALL_S] += steps[0].wall_offset_s
    return times, rows


def _fold_steps(
    rank: RankFold,
    times: list[int],
    rows: np.ndarray[Any, Any],
    changes: dict[str, Any],
    unmeasured: tuple[int, int] | None,
) -> None:
    totals = rank.totals
    recent_totals = list(rank.recent_totals)
    step_times = list(rank.recent_step_s)
    epoch, between_epochs_s = rank.epoch, rank.between_epochs_s
    last_batches: dict[int, float] = {}
    # One pass over plain floats is cheaper than one NumPy call per column, because a poll usually
    # has only a few rows. A backlog of 20,000 rows still takes only some tens of milliseconds.
    # ``x == x`` is False for NaN and faster than a call of ``math.isnan``.
    for t_ns, row in zip(times, rows.tolist(), strict=True):
        is_measured = unmeasured is None or not unmeasured[0] <= row[_GLOBAL_STEP] <= unmeasured[1]
        if not is_measured:
            row[_STEP_S] = math.nan
        step_s, row_epoch = row[_STEP_S], _int_or_none(row[_EPOCH])
        elapsed = (t_ns - totals.t_ns) / 1e9 if totals else None
        new_epoch = totals is not None and row_epoch is not None and row_epoch != epoch
        pause = 0.0
        if new_epoch and elapsed is not None:
            usual_s = median(step_times[-8:]) if step_times else 0.0
            between_epochs_s = pause = max(0.0, elapsed - usual_s)
        totals = _add_batch(totals, t_ns, row, pause)
        if not recent_totals or t_ns - recent_totals[-1].t_ns >= TOTALS_SPACING_NS:
            recent_totals.append(totals)
        if row_epoch is not None:
            epoch = row_epoch
            last_batches[epoch] = row[StepField.BATCH]
        if not new_epoch and is_measured:
            if step_s == step_s:
                step_times.append(step_s)
            elif elapsed is not None:
                step_times.append(elapsed)
    if len(recent_totals) > _TOTALS_MAX:
        recent_totals = recent_totals[-_TOTALS_KEPT:]
    last = rows[-1].tolist()
    # The batch index counts from 0.
    completed = {e: int(batch) + 1 for e, batch in last_batches.items() if math.isfinite(batch)}
    window = window_before(recent_totals, totals) if totals is not None else None
    changes.update(
        epoch_batches=dict(sorted({**rank.epoch_batches, **completed}.items())[-EPOCHS_KEPT:]),
        totals=totals,
        recent_totals=tuple(recent_totals),
        epoch=epoch,
        batch=_int_or_previous(last[StepField.BATCH], rank.batch),
        global_step=_int_or_previous(last[StepField.GLOBAL_STEP], rank.global_step),
        wall_s=_finite_or_none(last[StepField.WALL_S]) or rank.wall_s,
        last_step=tuple(last),
        recent_step_s=tuple(step_times[-RECENT_STEPS:]),
        between_epochs_s=between_epochs_s,
        samples_per_s=window.samples_per_s if window is not None else None,
    )
    _fold_losses(rank, rows, changes)


def _add_batch(
    previous: RunningTotals | None, t_ns: int, row: list[float], pause_s: float
) -> RunningTotals:
    """Return the totals after one more batch. Values that are not known (NaN) add nothing."""
    step, batches, samples, timed, fetch, forward, backward, optimizer, pauses = (
        previous[1:] if previous else (0.0,) * 9
    )
    if row[_GLOBAL_STEP] == row[_GLOBAL_STEP]:
        step = row[_GLOBAL_STEP]
    step_s = row[_STEP_S]
    if step_s == step_s:
        timed += step_s
        # Samples and the parts of a step are added only if the time of the step is known, because
        # rates and fractions divide by these times.
        samples += value if (value := row[_SAMPLES]) == value else 0.0
        fetch += value if (value := row[_FETCH_S]) == value else 0.0
        forward += value if (value := row[_FORWARD_S]) == value else 0.0
        backward += value if (value := row[_BACKWARD_S]) == value else 0.0
        optimizer += value if (value := row[_OPTIMIZER_S]) == value else 0.0
    pauses += pause_s
    return RunningTotals(
        t_ns, step, batches + 1, samples, timed, fetch, forward, backward, optimizer, pauses
    )


def window_before(recent_totals: Sequence[RunningTotals], end: RunningTotals) -> Window | None:
    """Return the throughput window that ends at ``end``; None if it is too short."""
    begin = next((t for t in recent_totals if end.timed_s - t.timed_s <= WINDOW_S), None)
    if begin is None or begin.batches == end.batches:
        begin = recent_totals[-4] if len(recent_totals) >= 4 else recent_totals[0]
    if end.timed_s - begin.timed_s < MIN_WINDOW_S:
        # Short steps have followed one that is longer than a window; then it counts as well.
        long_ago = (t for t in reversed(recent_totals) if end.timed_s - t.timed_s >= MIN_WINDOW_S)
        begin = next(long_ago, begin)
    seconds = end.timed_s - begin.timed_s
    return Window(begin, end, seconds) if seconds >= MIN_WINDOW_S else None


def _fold_losses(rank: RankFold, rows: np.ndarray[Any, Any], changes: dict[str, Any]) -> None:
    losses = rows[:, StepField.LOSS]
    tail = losses[-RECENT_STEPS:].tolist()
    changes["recent_loss"] = (*rank.recent_loss, *tail)[-RECENT_STEPS:]
    finite = np.isfinite(losses)
    finite_count = int(finite.sum())
    if not finite_count and rank.loss is None and not np.isinf(losses).any():
        return  # The script's training_step returns no loss.
    bad_at_end = _count_not_finite_at_end(finite)
    changes["bad_loss"] = rank.bad_loss + bad_at_end if bad_at_end == len(losses) else bad_at_end
    if bad_at_end and not (rank.bad_loss and bad_at_end == len(losses)):
        first = rows[len(losses) - bad_at_end].tolist()
        changes["bad_loss_step"] = _int_or_none(first[StepField.GLOBAL_STEP])
        changes["bad_loss_wall_s"] = _finite_or_none(first[StepField.WALL_S])
    elif not bad_at_end:
        changes["bad_loss_step"] = changes["bad_loss_wall_s"] = None
    step = _int_or_previous(float(rows[-1, StepField.GLOBAL_STEP]), rank.global_step) or 0
    low = float(losses[finite].min()) if finite_count else None
    high = float(losses[finite].max()) if finite_count else None
    changes["loss"] = _updated_metric(rank.loss, float(losses[-1]), step, low, high)


def _count_not_finite_at_end(finite: np.ndarray[Any, Any]) -> int:
    """Return how many values at the end are not finite."""
    good = np.flatnonzero(finite)
    return len(finite) - (int(good[-1]) + 1 if len(good) else 0)


def _updated_metric(
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
    records: Sequence[Record],
    changes: dict[str, Any],
    events: list[FoldedEvent],
) -> None:
    logged: list[Record] = []
    for record in records:
        if record.kind == RecordKind.METRICS:
            logged.append(record)
            continue
        label = json_label(record)
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
            elif event.kind in _ERRORS:
                changes[_ERRORS[event.kind]] = str(label.get("error") or event.text or "unknown")
    if logged and rank.rank < METRIC_RANKS:
        changes["metrics"] = _folded_metrics(rank.metrics, logged)
        if changes.get("loss", rank.loss) is None:
            # The rows of steps have no loss: on a GPU, or in a program without a Trainer.
            for record in logged:
                _fold_logged_loss(rank, record, changes)


def _event(rank: int, t_ns: int, label: Mapping[str, Any]) -> FoldedEvent:
    kind, text = str(label.get("kind", "note")), str(label.get("text", ""))
    return FoldedEvent(rank=rank, t_ns=t_ns, kind=kind, text=text, fields=label)


def _folded_metrics(
    metrics: Mapping[str, MetricValue], records: Sequence[Record]
) -> dict[str, MetricValue]:
    """Return ``metrics`` with every value of the records in the best values."""
    poll: dict[str, list[float]] = {}
    """Name -> [lowest and highest finite value, last value, step of the last value]."""
    for record in records:
        row = logged_row(record)
        if row is None:
            continue
        for name, low, high, last in zip(row.names, row.low, row.high, row.last, strict=False):
            values = poll.get(name)
            if values is None:
                values = poll[name] = [math.inf, -math.inf, 0.0, 0]
            if -math.inf < low < values[0]:
                values[0] = low
            if values[1] < high < math.inf:
                values[1] = high
            values[2], values[3] = last, row.step or 0
    folded = dict(metrics)
    for name, (low, high, last, step) in poll.items():
        best = (low if low < math.inf else None, high if high > -math.inf else None)
        folded[name] = _updated_metric(folded.get(name), last, int(step), *best)
    return folded


def _fold_logged_loss(rank: RankFold, record: Record, changes: dict[str, Any]) -> None:
    """Note whether a loss that is only logged is bad."""
    row = logged_row(record)
    if row is None:
        return
    pairs = zip(row.names, row.last, strict=False)
    losses = {name: value for name, value in pairs if is_training_loss(name)}
    if not losses:
        return
    usual = next((name for name in losses if name.lower() in TRAIN_LOSS_ALIASES), None)
    value = losses[usual or next(iter(losses))]
    if math.isfinite(value):
        changes["bad_loss"], changes["bad_loss_step"] = 0, None
        return
    bad = changes.get("bad_loss", rank.bad_loss)
    changes["bad_loss"] = bad + 1
    changes["recent_loss"] = (*changes.get("recent_loss", rank.recent_loss), value)[-RECENT_STEPS:]
    if not bad:
        changes["bad_loss_step"], changes["bad_loss_wall_s"] = row.step, row.t


class LoggedRow(Struct, frozen=True):
    """A METRICS record: values of several metrics, or windows of values of each of them."""

    names: list[str]
    step: int | None
    """Step of the last value, as ``epoch`` and ``t``."""
    epoch: int | None
    t: float | None
    mean: list[float]
    low: list[float]
    high: list[float]
    last: list[float]
    count: int = 1
    """Number of values of each metric. If it is 1, the four lists are the same one."""
    first_step: int | None = None


def logged_row(record: Record) -> LoggedRow | None:
    """Return the contents of a METRICS record; None if a rank of another version wrote them."""
    label, array = json_label(record) or {}, record.array
    names, count = label.get("names"), _int_or_none(label.get("count")) or 1
    if not isinstance(names, list) or not isinstance(array, np.ndarray):
        return None
    step, epoch = _int_or_none(label.get("step")), _int_or_none(label.get("epoch"))
    t, names = _finite_or_none(label.get("t")), [str(name) for name in names]
    if count > 1 and array.ndim == 2 and len(array) == 4:
        first = _int_or_none(label.get("first_step"))
        mean, low, high, last = array.astype(np.float64).tolist()
        return LoggedRow(names, step, epoch, t, mean, low, high, last, count, first)
    values = np.asarray(array, dtype=np.float64).reshape(-1).tolist()
    return LoggedRow(names, step, epoch, t, values, values, values, values)


def metric_values(record: Record, name: str) -> list[tuple[int, float]]:
    """Return step and value of one metric in a METRICS record.

    Of a window these are its lowest, its highest and its last value.
    """
    row = logged_row(record)
    if row is None or name not in row.names:
        return []
    place, step = row.names.index(name), row.step or 0
    columns = (row.last,) if row.count == 1 else (row.low, row.high, row.last)
    return [(step, column[place]) for column in columns if place < len(column)]


def json_label(record: Record) -> dict[str, Any] | None:
    """Return the label's JSON object; None if it is not one (a writer of another version).

    Its unix time ``t`` is by the clock of this machine.
    """
    try:
        value = json.loads(record.label)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    if record.wall_offset_s and isinstance(value.get("t"), (int, float)):
        value["t"] += record.wall_offset_s
    return value


def _int_or_previous(value: float, previous: int | None) -> int | None:
    return previous if (number := _int_or_none(value)) is None else number


def _int_or_none(value: Any) -> int | None:
    number = _finite_or_none(value)
    return None if number is None else int(number)


def _finite_or_none(value: Any) -> float | None:
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None
