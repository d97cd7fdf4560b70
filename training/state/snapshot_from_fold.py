"""Parts of a ``RunSnapshot`` that follow from pulses and the fold: speed, metrics, ranks, progress.

Throughput is the number of samples of training steps divided by the time of these steps. A step
lasts from the end of the previous batch to the end of its own batch, so waiting for data counts.
Validation, checkpoints and pauses are between steps and do not count. A figure covers the last
``WINDOW_S`` seconds of steps, or the last few batches if they are slower than that. The throughput
of a run is the sum over its ranks. Charts, tables and the command line all show this figure; the
best throughput is its highest value so far. The supervisor stores this figure as the metric
``THROUGHPUT``, which is what charts draw.

A figure is a measurement and does not decay: it does not change until the next batch ends. After
``WINDOW_S`` seconds (or four median steps) without a batch it is ``None``, which means unknown.

Pure: the time (``now_ns``, CLOCK_MONOTONIC) is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean, median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.shared.record_types import (
    STEP_PHASES,
    Outcome,
    Phase,
    PulseState,
    RecordKind,
    StepField,
)
from ltui.training.state.metric_name_patterns import MAX_RANK_RATES, TOTAL_RANK, TRAIN_LOSS
from ltui.training.state.record_fold import (
    WINDOW_S,
    FoldState,
    RankFold,
    Window,
    metric_values,
    step_rows,
    window_before,
)
from ltui.training.state.run_snapshot import MetricValue, RankSnapshot, RankState, Throughput
from ltui.training.tensor_queue.queue_reader import Poll

POINT_INTERVAL_S = 0.5
"""Seconds of step time between two stored points."""
_STEPS_IN_WINDOW = 4
"""Median steps without a batch after which a window is out of date, if that is longer."""


def median_step_s(rank: RankFold) -> float | None:
    """Return the median duration of the rank's recent steps in seconds."""
    return median(rank.recent_step_s) if rank.recent_step_s else None


def mean_batch_s(rank: RankFold) -> float | None:
    """Return the mean duration of the rank's last batches in seconds, however long ago they ended.

    Unlike a median it holds if batches differ: with accumulated gradients, or if the host runs
    ahead of its GPU and waits for it now and then.
    """
    window = None if rank.totals is None else window_before(rank.recent_totals, rank.totals)
    return None if window is None else window.seconds / window.batches


def current_window(rank: RankFold, now_ns: int) -> Window | None:
    """Return the rank's current window.

    Return None if no batch has ended for a whole window, or if there are too few batches.
    """
    end = rank.totals
    if end is None:
        return None
    idle_s = (now_ns - end.t_ns) / 1e9
    if idle_s > max(WINDOW_S, _STEPS_IN_WINDOW * (median_step_s(rank) or 0.0)):
        return None
    return window_before(rank.recent_totals, end)


def throughput(fold: FoldState, now_ns: int) -> Throughput:
    """Return the throughput of the run: rates are sums and fractions are means over the ranks."""
    windows = {r: w for r, f in fold.ranks.items() if (w := current_window(f, now_ns)) is not None}
    if not windows:
        return Throughput(best_samples_per_s=fold.best_samples_per_s)
    rates = [rate for w in windows.values() if (rate := w.samples_per_s) is not None]
    fetch_fraction = _mean_fraction(fold, windows, "fetch")
    return Throughput(
        samples_per_s=sum(rates) if rates else None,
        best_samples_per_s=fold.best_samples_per_s,
        steps_per_s=windows[min(windows)].steps_per_s,
        data_wait_share=fetch_fraction,
        fetch_share=fetch_fraction,
        forward_share=_mean_fraction(fold, windows, "forward"),
        backward_share=_mean_fraction(fold, windows, "backward"),
        optimizer_share=_mean_fraction(fold, windows, "optimizer"),
    )


class ThroughputPoint(Struct, frozen=True):
    """The throughput at the end of a step."""

    timed_s: float
    """Step time of the lowest rank until then, in seconds."""
    t_ns: int
    step: int
    epoch: int | None
    wall_s: float
    rates: Mapping[int, float]
    """Samples per second of the run (``TOTAL_RANK``) and of each rank, if there are few."""


def next_point(
    fold: FoldState, ranks: Collection[int], previous: ThroughputPoint | None
) -> ThroughputPoint | None:
    """Return the point after ``previous`` if it is due and every rank has a rate.

    So the total is never that of some of the ranks.
    """
    lead = fold.lowest_active_rank
    if lead is None or lead.totals is None or lead.wall_s is None:
        return None
    timed_s = lead.totals.timed_s
    if previous is not None and 0 <= timed_s - previous.timed_s < POINT_INTERVAL_S:
        return None
    rates = {
        rank: folded.samples_per_s
        for rank in ranks
        if (folded := fold.ranks.get(rank)) and folded.samples_per_s is not None
    }
    if not rates or len(rates) < len(ranks):
        return None
    total = {TOTAL_RANK: sum(rates.values())}
    shown = {**total, **rates} if 1 < len(rates) <= MAX_RANK_RATES else total
    step, t_ns = lead.global_step or 0, lead.totals.t_ns
    return ThroughputPoint(timed_s, t_ns, step, lead.epoch, lead.wall_s, shown)


def without_current_rates(current: Throughput) -> Throughput:
    """Return the throughput of a run that is paused or stalled: its current rates are unknown."""
    return replace(current, samples_per_s=None, steps_per_s=None)


def _mean_fraction(fold: FoldState, windows: Mapping[int, Window], part: str) -> float | None:
    """Return the mean over the ranks that measure this part of a step; None if none does."""
    known = [w.fraction(part) for rank, w in windows.items() if fold.ranks[rank].knows(part)]
    return fmean(known) if known else None


_PAUSES = frozenset({Phase.SANITY, Phase.VALIDATION, Phase.CHECKPOINT, Phase.EPOCH_END, Phase.TEST})
_AT_REST = frozenset({RankState.PAUSED, RankState.STALLED, RankState.WAITING, RankState.DEAD})
"""States in which a rank has no current rate."""


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of the run; the fields are those of ``RunSnapshot``."""

    world_size: int | None = None
    epoch: int | None = None
    global_step: int | None = None
    max_steps: int | None = None
    max_epochs: int | None = None
    batches_per_epoch: int | None = None
    eta_s: float | None = None


def training_has_started(pulses: Iterable[PulseState | None]) -> bool:
    """Return True if some rank has reached its first step; until then a run is starting."""
    return any(
        p.phase in STEP_PHASES or p.global_step > 0 or p.outcome is not Outcome.RUNNING
        for p in pulses
        if p is not None
    )


def metrics(fold: FoldState) -> dict[str, MetricValue]:
    """Return the newest value of each metric, from the lowest rank that logged it.

    ``train/loss`` comes first. It is the loss that ``training_step`` returned, unless the user logs
    a metric by that name.
    """
    newest: dict[str, MetricValue] = {}
    for rank in sorted(fold.ranks):
        for name, value in fold.ranks[rank].metrics.items():
            newest.setdefault(name, value)
    lowest_rank = fold.lowest_active_rank
    if TRAIN_LOSS not in newest and lowest_rank is not None and lowest_rank.loss is not None:
        return {TRAIN_LOSS: replace(lowest_rank.loss, measured=True), **newest}
    return newest


def logged_values(fold: FoldState, polls: Mapping[int, Poll], name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric: those in ``polls``, then its newest one.

    ``polls`` are the polls that were folded last. The values are from the rank whose newest value
    ``metrics`` returns.
    """
    newest = metrics(fold).get(name)
    if newest is None:
        return []
    values: list[tuple[int, float]] = []
    rank = min((r for r, f in fold.ranks.items() if name in f.metrics), default=None)
    if rank is not None:
        records = polls[rank].records if rank in polls else ()
        metrics_records = (record for record in records if record.kind == RecordKind.METRICS)
        values = [value for record in metrics_records for value in metric_values(record, name)]
    elif (lowest_rank := fold.lowest_active_rank) is not None and lowest_rank.rank in polls:
        _, rows = step_rows(polls[lowest_rank.rank].records)
        columns = rows[:, [StepField.GLOBAL_STEP, StepField.LOSS]].tolist()
        values = [(int(step), loss) for step, loss in columns if math.isfinite(step)]
    return [*values, (newest.step, newest.last)]


def progress(fold: FoldState, pulses: Mapping[int, PulseState | None], now_ns: int) -> Progress:
    """Return the progress of the lowest active rank and the time to the end at its recent pace."""
    lowest_rank, pulse = fold.lowest_active_rank, _leading_pulse(pulses)
    size = _world_size(fold, pulse)
    if pulse is not None and pulse.phase is Phase.STARTING:  # it has no position yet
        pulse = None
    plan = next((f.plan for _, f in sorted(fold.ranks.items()) if f.plan is not None), {})
    max_epochs = _positive_int(plan.get("max_epochs"))
    per_epoch = _positive_int(plan.get("batches_per_epoch"))
    max_steps = _max_steps(plan, lowest_rank, max_epochs, per_epoch)
    position = pulse or lowest_rank
    step = _first_int(position and position.global_step, plan.get("global_step"))
    rank_epoch = lowest_rank and lowest_rank.epoch
    current = Progress(
        world_size=size,
        epoch=_first_int(pulse.known_epoch if pulse else rank_epoch, plan.get("epoch")),
        global_step=step,
        max_steps=max_steps,
        max_epochs=max_epochs,
        batches_per_epoch=per_epoch,
    )
    return replace(current, eta_s=_eta_s(fold, pulse, current, now_ns))


def at_least(current: Progress, start: Progress | None) -> Progress:
    """Return ``current``, or ``start`` while the ranks of a resumed attempt have not reached it."""
    if start is None or start.global_step is None:
        return current
    if current.global_step is not None and current.global_step >= start.global_step:
        return current
    return replace(
        current,
        epoch=start.epoch,
        global_step=start.global_step,
        max_steps=current.max_steps or start.max_steps,
        max_epochs=current.max_epochs or start.max_epochs,
        batches_per_epoch=current.batches_per_epoch or start.batches_per_epoch,
    )


def rank_snapshots(
    fold: FoldState,
    pulses: Mapping[int, PulseState | None],
    states: Mapping[int, RankState],
    now_ns: int,
) -> tuple[RankSnapshot, ...]:
    """Return all known ranks in order. The caller adds process usage and exit codes."""
    return tuple(
        rank_snapshot(
            fold.ranks.get(rank) or RankFold(rank=rank),
            pulses.get(rank),
            states.get(rank, RankState.UNKNOWN),
            now_ns,
        )
        for rank in sorted({*fold.ranks, *pulses, *states})
    )


def rank_snapshot(
    rank: RankFold, pulse: PulseState | None, state: RankState, now_ns: int
) -> RankSnapshot:
    """Return the snapshot of one rank from its fold, its pulse and its state."""
    hello = rank.hello or {}
    current = current_window(rank, now_ns) if state not in _AT_REST else None
    return RankSnapshot(
        rank=rank.rank,
        local_rank=pulse.local_rank if pulse else _first_int(hello.get("local_rank")),
        pid=pulse.pid if pulse else _first_int(hello.get("pid")),
        node=pulse.node if pulse else 0,
        host=_text_or_none(hello.get("host")),
        device=_text_or_none(hello.get("device")),
        gpu_uuid=_text_or_none(hello.get("gpu_uuid")),
        state=state,
        phase=pulse.phase.label if pulse else None,
        epoch=pulse.known_epoch if pulse else rank.epoch,
        batch=pulse.batch if pulse else rank.batch,
        global_step=pulse.global_step if pulse else rank.global_step,
        age_s=None if pulse is None else max(0.0, (now_ns - pulse.changed_ns) / 1e9),
        samples_per_s=current.samples_per_s if current else None,
        step_s=median_step_s(rank),
        data_wait_share=current.fraction("fetch") if current and rank.knows("fetch") else None,
        recent_step_s=rank.recent_step_s,
        note=_note(rank),
        missed_records=rank.missed,
    )


def _note(rank: RankFold) -> str | None:
    if rank.exception is not None:
        return rank.exception.text or "raised an exception"
    if rank.telemetry_error is not None:
        return f"telemetry off: {rank.telemetry_error}"
    return None


def _leading_pulse(pulses: Mapping[int, PulseState | None]) -> PulseState | None:
    """Return the pulse of the lowest rank, or of the furthest one if the lowest has ended."""
    valid = {r: p for r, p in pulses.items() if p is not None and p.phase is not Phase.UNKNOWN}
    lowest = valid[min(valid)] if valid else None
    if lowest is None or lowest.outcome is Outcome.RUNNING:
        return lowest
    return max(valid.values(), key=lambda each: each.global_step)  # such as under DDP's Join


def _world_size(fold: FoldState, pulse: PulseState | None) -> int | None:
    if pulse is not None and pulse.world_size > 0:
        return pulse.world_size
    hello = next((f.hello for f in fold.ranks.values() if f.hello is not None), {})
    return _positive_int(hello.get("world_size"))


def _max_steps(
    plan: Mapping[str, Any], rank: RankFold | None, max_epochs: int | None, per_epoch: int | None
) -> int | None:
    """Return the planned number of steps, or derive it from epochs, batches and accumulation."""
    planned = _positive_int(plan.get("max_steps"))
    if planned is not None or max_epochs is None or per_epoch is None:
        return planned
    hello = (rank.hello if rank else None) or {}
    accumulate = _positive_int(hello.get("accumulate_grad_batches")) or 1
    return max_epochs * math.ceil(per_epoch / accumulate)


def _eta_s(
    fold: FoldState, pulse: PulseState | None, current: Progress, now_ns: int
) -> float | None:
    """Estimate the remaining seconds from the recent pace and the last pause between epochs.

    Return None while no step ends, unless that is expected (validation, a checkpoint). A pause by
    the user does not slow the pace down: it counts from its end on.
    """
    rank, step, max_steps = fold.lowest_active_rank, current.global_step, current.max_steps
    if rank is None or rank.totals is None or max_steps is None or step is None:
        return None
    if pulse is not None and pulse.outcome is not Outcome.RUNNING:
        return None
    if current_window(rank, now_ns) is None and (pulse is None or pulse.phase not in _PAUSES):
        return None
    continued = (e.t_ns for e in fold.events if e.kind == "continued" and e.rank == rank.rank)
    since_ns = max(continued, default=0)
    begin = next((t for t in rank.recent_totals if t.t_ns >= since_ns), rank.totals)
    steps = rank.totals.global_step - begin.global_step
    seconds = (rank.totals.t_ns - begin.t_ns) / 1e9 - (rank.totals.pauses_s - begin.pauses_s)
    if steps <= 0 or seconds <= 0:
        return None
    epochs_to_end = max(0, (current.max_epochs or 0) - (rank.epoch or 0) - 1)
    pauses_s = epochs_to_end * (rank.between_epochs_s or 0.0)
    return max(0, max_steps - step) * seconds / steps + pauses_s


def _first_int(*values: Any) -> int | None:
    """Return the first value that is an integer; None if there is none."""
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _positive_int(value: Any) -> int | None:
    number = _first_int(value)
    return number if number is not None and number > 0 else None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
