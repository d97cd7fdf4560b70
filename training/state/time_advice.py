"""What would make a run faster, where its time ledger has the numbers to say so. Pure."""

from __future__ import annotations

import math

from msgspec import Struct

from ltui.training.state.time_ledger import Part, TimeFacts, TimeLedger

LEAST_DATA, LEAST_VALIDATION, LEAST_CHECKPOINTS, LEAST_REPEATED = 0.10, 0.15, 0.01, 0.02
"""Shares of the time below which nothing is advised."""
ENOUGH_S = 600.0
"""Seconds of a run below which its failures say nothing about how often to save."""
_ENOUGH_CHECKPOINTS = 3
_DIFFERS = 1.3
"""Factor by which another distance between checkpoints must differ to be worth a change."""


class LoaderSetting(Struct, frozen=True, kw_only=True):
    """The loader of a run."""

    preset: str | None = None
    workers: int | None = None
    """DataLoader workers of the run; None if it is not known."""
    best_workers: int | None = None
    """Workers that ``ltui bench data`` has recommended; None if it was not run."""


class Advice(Struct, frozen=True):
    """One sentence, and the share of the time that it would gain at most."""

    gain: float
    text: str


class CheckpointCost(Struct, frozen=True):
    """What checkpoints cost a run, and how often Young's rule would save one."""

    every_s: float
    each_s: float
    best_s: float
    """The square root of 2 x ``each_s`` x the mean time between failures (J. W. Young, 1974)."""
    failures: int
    """If it is 0, the whole time counts as that between failures, so ``best_s`` is a minimum."""
    seconds: float


def advice(ledger: TimeLedger, facts: TimeFacts, loader: LoaderSetting) -> list[Advice]:
    """Return what to change, in the order of what it would gain."""
    run = ledger.run
    if run.counted_us <= 0:
        return []
    share = {part: run.us(part) / run.counted_us for part in Part}
    found = [_data(share[Part.DATA], loader), _validation(share[Part.VALIDATION])]
    cost = checkpoint_cost(ledger, facts)
    if cost is not None:
        found += [
            _rarer(cost, share[Part.CHECKPOINTS]),
            _more_often(cost, share[Part.REPEATED]),
        ]
    return sorted((one for one in found if one is not None), key=lambda one: -one.gain)


def checkpoint_cost(ledger: TimeLedger, facts: TimeFacts) -> CheckpointCost | None:
    """Return what checkpoints cost; None if too little was measured."""
    saves = [i.end - i.begin for i in facts.intervals if i.part is Part.CHECKPOINTS]
    seconds = ledger.run.counted_us / 1e6
    each_s = sum(saves) / len(saves) if saves else 0.0
    if len(saves) < _ENOUGH_CHECKPOINTS or seconds < ENOUGH_S or each_s <= 0:
        return None
    failures = sum(attempt.restarted for attempt in facts.attempts)
    best_s = math.sqrt(2 * each_s * seconds / max(1, failures))
    return CheckpointCost(seconds / len(saves), each_s, best_s, failures, seconds)


def _data(share: float, loader: LoaderSetting) -> Advice | None:
    if share < LEAST_DATA:
        return None
    waits = f"The run waits for data {percent(share)} of the time"
    best, now = loader.best_workers, loader.workers
    if best is not None and now is not None and best > now:
        text = f"{waits}: {best} workers instead of {now} (measured by `ltui bench data`)."
    elif loader.preset is not None and best is None:
        text = f"{waits}: `ltui bench data {loader.preset}` measures how many workers would do."
    elif best is not None:
        text = f"{waits}, and more workers do not help (measured by `ltui bench data`)."
    else:
        text = f"{waits}: give its DataLoader more workers (num_workers), or make a sample cheaper."
    return Advice(share, text)


def _validation(share: float) -> Advice | None:
    if share < LEAST_VALIDATION:
        return None
    text = f"Validation takes {percent(share)} of the time: half as often would gain "
    return Advice(share / 2, f"{text}{percent(share / 2)}.")


def _rarer(cost: CheckpointCost, share: float) -> Advice | None:
    if share < LEAST_CHECKPOINTS or cost.best_s < _DIFFERS * cost.every_s:
        return None
    text = (
        f"Checkpoints every {minutes(cost.every_s)} cost {percent(share)}: every "
        f"{minutes(cost.best_s)} would do {_source(cost)}."
    )
    return Advice(share * (1 - cost.every_s / cost.best_s), text)


def _more_often(cost: CheckpointCost, share: float) -> Advice | None:
    more = cost.each_s / cost.best_s - cost.each_s / cost.every_s
    gain = share * (1 - cost.best_s / cost.every_s) - more
    if share < LEAST_REPEATED or cost.failures < 1 or cost.every_s < _DIFFERS * cost.best_s:
        return None
    text = (
        f"Repeated steps cost {percent(share)}: a checkpoint every {minutes(cost.best_s)} instead "
        f"of {minutes(cost.every_s)} would lose less {_source(cost)}."
    )
    return Advice(gain, text) if gain > 0 else None


def _source(cost: CheckpointCost) -> str:
    failed = {0: "no restart", 1: "one restart"}.get(cost.failures, f"{cost.failures} restarts")
    return (
        f"(Young's rule from {cost.each_s:.1f} s a checkpoint and {failed} in "
        f"{minutes(cost.seconds)})"
    )


def percent(share: float) -> str:
    """Return a share as ``41 %``."""
    return f"{100 * share:.0f} %"


def minutes(seconds: float) -> str:
    """Return ``40 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
