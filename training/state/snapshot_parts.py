"""Parts of a ``RunSnapshot`` that follow from pulses and the fold: metrics, ranks, progress.

Pure: the moment (``now_ns``, CLOCK_MONOTONIC) is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ltui.training.state.metric_names import TRAIN_LOSS
from ltui.training.state.record_fold import FoldState, RankFold
from ltui.training.state.run_snapshot import MetricValue, RankSnapshot, RankState
from ltui.training.state.throughput import current_window, median_step_s
from ltui.training.tensor_queue.record_types import Outcome, Phase, PulseState

_PAUSES = frozenset({Phase.SANITY, Phase.VALIDATION, Phase.CHECKPOINT, Phase.EPOCH_END, Phase.TEST})
_AT_REST = frozenset({RankState.PAUSED, RankState.STALLED, RankState.WAITING, RankState.DEAD})
"""A rank in these states has no present rate."""
_STEP_PHASES = frozenset(range(Phase.FETCH, Phase.BATCH_END + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the run is; every field as in ``RunSnapshot``."""

    world_size: int | None = None
    epoch: int | None = None
    global_step: int | None = None
    max_steps: int | None = None
    max_epochs: int | None = None
    batches_per_epoch: int | None = None
    eta_s: float | None = None


def training_has_started(pulses: Iterable[PulseState | None]) -> bool:
    """Whether some rank has come to its first step; a run is starting until then."""
    return any(
        p.phase in _STEP_PHASES or p.global_step > 0 or p.outcome is not Outcome.RUNNING
        for p in pulses
        if p is not None
    )


def metrics(fold: FoldState) -> dict[str, MetricValue]:
    """The newest value of each metric: of the lowest rank that logged it, ``train/loss`` first.

    ``train/loss`` is the loss that training_step returned, unless the user logs that very name.
    """
    found: dict[str, MetricValue] = {}
    for rank in sorted(fold.ranks):
        for name, value in fold.ranks[rank].metrics.items():
            found.setdefault(name, value)
    lead = fold.lowest_active_rank
    if TRAIN_LOSS not in found and lead is not None and lead.loss is not None:
        return {TRAIN_LOSS: lead.loss, **found}
    return found


def progress(fold: FoldState, pulses: Mapping[int, PulseState | None], now_ns: int) -> Progress:
    """How far the lead rank is, and when the run will end at the recent pace."""
    lead, pulse = fold.lowest_active_rank, _lead_pulse(pulses)
    plan: Mapping[str, Any] = _plan(fold)
    max_epochs, per_epoch = (
        _positive(plan.get("max_epochs")),
        _positive(plan.get("batches_per_epoch")),
    )
    step = (
        pulse.global_step if pulse else _first(lead and lead.global_step, plan.get("global_step"))
    )
    max_steps = _max_steps(plan, lead, max_epochs, per_epoch)
    return Progress(
        world_size=_world_size(fold, pulse),
        epoch=pulse.epoch if pulse else _first(lead and lead.epoch, plan.get("epoch")),
        global_step=step,
        max_steps=max_steps,
        max_epochs=max_epochs,
        batches_per_epoch=per_epoch,
        eta_s=_eta_s(lead, pulse, step, max_steps, max_epochs, now_ns),
    )


def at_least(found: Progress, start: Progress | None) -> Progress:
    """``found``; where a resumed attempt starts, as long as its ranks have not got there."""
    if start is None or start.global_step is None:
        return found
    if found.global_step is not None and found.global_step >= start.global_step:
        return found
    return replace(
        found,
        epoch=start.epoch,
        global_step=start.global_step,
        max_steps=found.max_steps or start.max_steps,
        max_epochs=found.max_epochs or start.max_epochs,
        batches_per_epoch=found.batches_per_epoch or start.batches_per_epoch,
    )


def rank_snapshots(
    fold: FoldState,
    pulses: Mapping[int, PulseState | None],
    states: Mapping[int, RankState],
    now_ns: int,
) -> tuple[RankSnapshot, ...]:
    """Every rank heard of, by rank. Process readings and exit codes are the caller's to add."""
    ranks = sorted({*fold.ranks, *pulses, *states})
    return tuple(
        rank_snapshot(
            fold.ranks.get(rank) or RankFold(rank=rank),
            pulses.get(rank),
            states.get(rank, RankState.UNKNOWN),
            now_ns,
        )
        for rank in ranks
    )


def rank_snapshot(
    rank: RankFold, pulse: PulseState | None, state: RankState, now_ns: int
) -> RankSnapshot:
    hello = rank.hello or {}
    present = current_window(rank, now_ns) if state not in _AT_REST else None
    return RankSnapshot(
        rank=rank.rank,
        local_rank=pulse.local_rank if pulse else _first(hello.get("local_rank")),
        pid=pulse.pid if pulse else _first(hello.get("pid")),
        host=_text(hello.get("host")),
        device=_text(hello.get("device")),
        gpu_uuid=_text(hello.get("gpu_uuid")),
        state=state,
        phase=pulse.phase.label if pulse else None,
        epoch=pulse.epoch if pulse else rank.epoch,
        batch=pulse.batch if pulse else rank.batch,
        global_step=pulse.global_step if pulse else rank.global_step,
        age_s=_age_s(pulse, now_ns),
        samples_per_s=present.samples_per_s if present else None,
        step_s=median_step_s(rank),
        data_wait_share=present.share("fetch") if present else None,
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


def _age_s(pulse: PulseState | None, now_ns: int) -> float | None:
    return None if pulse is None else max(0.0, (now_ns - pulse.changed_ns) / 1e9)


def _lead_pulse(pulses: Mapping[int, PulseState | None]) -> PulseState | None:
    known = {r: p for r, p in pulses.items() if p is not None and p.phase is not Phase.UNKNOWN}
    return known[min(known)] if known else None


def _plan(fold: FoldState) -> Mapping[str, Any]:
    for rank in sorted(fold.ranks):
        plan = fold.ranks[rank].plan
        if plan is not None:
            return plan
    return {}


def _world_size(fold: FoldState, pulse: PulseState | None) -> int | None:
    if pulse is not None and pulse.world_size > 0:
        return pulse.world_size
    for rank in fold.ranks.values():
        if rank.hello is not None:
            return _positive(rank.hello.get("world_size"))
    return None


def _max_steps(
    plan: Mapping[str, Any], lead: RankFold | None, max_epochs: int | None, per_epoch: int | None
) -> int | None:
    """What PLAN says, else from epochs, batches and accumulation."""
    stated = _positive(plan.get("max_steps"))
    if stated is not None or max_epochs is None or per_epoch is None:
        return stated
    hello = (lead.hello if lead else None) or {}
    accumulate = _positive(hello.get("accumulate_grad_batches")) or 1
    return max_epochs * math.ceil(per_epoch / accumulate)


def _eta_s(
    lead: RankFold | None,
    pulse: PulseState | None,
    step: int | None,
    max_steps: int | None,
    max_epochs: int | None,
    now_ns: int,
) -> float | None:
    """Remaining steps at the recent pace, and a pause like the last for every epoch to end.

    None while nothing moves, except where standing still is expected (validation, a checkpoint).
    """
    if lead is None or lead.totals is None or max_steps is None or step is None:
        return None
    if pulse is not None and pulse.outcome is not Outcome.RUNNING:
        return None
    if current_window(lead, now_ns) is None and (pulse is None or pulse.phase not in _PAUSES):
        return None
    begin = lead.recent_totals[0]
    steps = lead.totals.global_step - begin.global_step
    seconds = (lead.totals.t_ns - begin.t_ns) / 1e9 - (lead.totals.pauses_s - begin.pauses_s)
    if steps <= 0 or seconds <= 0:
        return None
    epochs_to_end = max(0, (max_epochs or 0) - (lead.epoch or 0) - 1)
    pauses_s = epochs_to_end * (lead.between_epochs_s or 0.0)
    return max(0, max_steps - step) * seconds / steps + pauses_s


def _first(*values: Any) -> int | None:
    """The first that is a whole number."""
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
