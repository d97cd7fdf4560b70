"""What limits the speed of a run, from what is measured without a profiler. Pure.

The heartbeat thread of a rank counts, twice a second, whether the rank sleeps in a collective, and
whether its training thread, while it computes for half a millisecond, moves on in the program. So
waiting differs from computing, and small operators from large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, median_low

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.state.run_snapshot import Limit, LimitKind

LEAST_SHARE = 0.25
"""Share of the time from which on something limits the speed."""
LEAST_CHECKPOINTS = 0.15
"""The same of checkpoints."""
LEAST_BEATS = 12
"""Heartbeats in a window below which their counts say nothing."""
LEAST_STEPS = 3
SMALL_OPERATORS, LARGE_OPERATORS = 0.7, 0.45
"""Share of the looks at the training thread in which it had moved on: from the first value on its
operators are small, up to the second one they are large."""
_FROM_DATA = 0.5
"""Part of the seconds lost to a rank from which on waiting for data is the reason."""
BUSY_GPU, IDLE_GPU = 85.0, 60.0
"""Percent of the time in which the GPUs run kernels."""


class RankLoad(Struct, frozen=True, kw_only=True):
    """What one rank did in a window."""

    rank: int
    steps: float
    seconds: float
    """All its steps together."""
    fetch_s: float = 0.0
    own_s: float | None = None
    """Seconds of its own work: data, forward and optimizer; None if its parts are not known."""
    beats: int = 0
    """Heartbeats with known collectives."""
    waiting: int = 0
    """Heartbeats in which it slept in a collective."""
    looks: int = 0
    """Looks at its training thread, outside of backward passes, optimizers and waits."""
    moved: int = 0
    slept: int = 0
    """The same looks in which it slept instead, in neither a collective nor its loader."""
    gpu_percent: float | None = None
    on_gpu: bool = False

    @property
    def wait_share(self) -> float | None:
        """Fraction of the time in collectives; None if that is not known."""
        return self.waiting / self.beats if self.beats >= LEAST_BEATS else None


class RunLoad(Struct, frozen=True, kw_only=True):
    """What a run did in a window of ``seconds``."""

    seconds: float
    validation: float = 0.0
    """Fraction of the time in which a rank validated."""
    checkpoints: float = 0.0
    """Fraction of the time in which a rank saved a checkpoint."""
    ranks: tuple[RankLoad, ...] = ()


def slowest_first(
    loads: Sequence[RankLoad], known: Sequence[int], named: int | None = None
) -> list[int]:
    """Return the ranks ``known``: first the one that is ``named`` as the limit, then those that
    work most, or wait least for the others.

    Ranks without a step in the window are the last.
    """
    measured = [load for load in loads if load.steps > 0 and load.rank in known]
    if all(load.own_s is not None for load in measured):
        measured.sort(key=lambda load: -(load.own_s or 0.0) / load.steps)
    elif all(load.wait_share is not None for load in measured):
        measured.sort(key=lambda load: load.wait_share or 0.0)
    else:
        measured.sort(key=lambda load: -load.seconds / load.steps)
    ranks = [load.rank for load in measured]
    ranks += sorted(set(known) - set(ranks))
    return sorted(ranks, key=lambda rank: rank != named)


def find_limit(load: RunLoad) -> Limit | None:
    """Return what limits the speed; None before there are enough steps."""
    if load.seconds <= 0:
        return None
    steps = max((rank.steps for rank in load.ranks), default=0.0)
    found = [
        _around_steps(LimitKind.VALIDATION, load.validation, load.seconds, steps, LEAST_SHARE),
        _around_steps(
            LimitKind.CHECKPOINTS, load.checkpoints, load.seconds, steps, LEAST_CHECKPOINTS
        ),
    ]
    ranks = [rank for rank in load.ranks if rank.steps >= LEAST_STEPS and rank.seconds > 0]
    is_known = bool(ranks) and len(ranks) == len(load.ranks)
    step_s = max((rank.seconds / rank.steps for rank in ranks), default=0.0)
    if is_known:
        in_steps = min(1.0, max(rank.seconds for rank in ranks) / load.seconds)
        within = (_data(ranks, step_s), _rank(ranks, step_s), _communication(ranks, step_s))
        found += [_scaled(limit, in_steps) for limit in within]
    known = [limit for limit in found if limit is not None]
    if known:
        return max(known, key=lambda limit: limit.share or 0.0)
    return _computing(ranks, step_s) if is_known else None


def _around_steps(
    kind: LimitKind, share: float, seconds: float, steps: float, least: float
) -> Limit | None:
    if share < least:
        return None
    each_s = share * seconds / steps if steps else None
    each = "" if each_s is None else f", {each_s:.3g} s for each step"
    text = f"{100 * share:.0f} % of the time{each}"
    return Limit(kind=kind, share=share, seconds=each_s, evidence=(text,))


def _scaled(limit: Limit | None, in_steps: float) -> Limit | None:
    """Return the limit with its share of all time, if that is enough."""
    if limit is None or limit.share is None or limit.share * in_steps < LEAST_SHARE:
        return None
    return replace(limit, share=limit.share * in_steps)


def _data(ranks: Sequence[RankLoad], step_s: float) -> Limit | None:
    """Return how long most ranks wait for data in each step."""
    share = median_low(rank.fetch_s / rank.seconds for rank in ranks)
    who = "it waits" if len(ranks) == 1 else "the ranks wait"
    text = f"{who} {share * step_s:.3g} s of each step ({step_s:.3g} s) for a batch"
    return Limit(kind=LimitKind.DATA, share=share, seconds=share * step_s, evidence=(text,))


def _rank(ranks: Sequence[RankLoad], step_s: float) -> Limit | None:
    """Return the rank that others wait for: it works more, or waits less in collectives."""
    if len(ranks) < 2:
        return None
    own = {r.rank: r.own_s / r.steps for r in ranks if r.own_s is not None}
    waits = {r.rank: r.wait_share for r in ranks if r.wait_share is not None}
    found: list[tuple[float, int, str]] = []
    if len(own) == len(ranks):
        slowest = max(own, key=lambda rank: own[rank])
        others_s = median_low(s for rank, s in own.items() if rank != slowest)
        text = f"it works {own[slowest]:.3g} s in each step, another rank {others_s:.3g} s"
        found.append(((own[slowest] - others_s) / step_s, slowest, text))
    if len(waits) == len(ranks):
        slowest = min(waits, key=lambda rank: waits[rank])
        others = median_low(share for rank, share in waits.items() if rank != slowest)
        text = (
            f"it waits {100 * waits[slowest]:.0f} % of the time in collectives, another rank "
            f"{100 * others:.0f} %"
        )
        found.append((others - waits[slowest], slowest, text))
    if not found:
        return None
    share, slowest, text = max(found)
    fetch_s = {rank.rank: rank.fetch_s / rank.steps for rank in ranks}
    others_s = median_low(s for rank, s in fetch_s.items() if rank != slowest)
    kind = LimitKind.RANK
    evidence: tuple[str, ...] = (text,)
    if fetch_s[slowest] - others_s >= _FROM_DATA * share * step_s:
        # If the loaders of all ranks are slow, one of them waits, and the others for it.
        waits_s = f"rank {slowest} waits {fetch_s[slowest]:.3g} s of each step ({step_s:.3g} s)"
        kind, evidence = LimitKind.DATA, (f"{waits_s} for a batch, and the others for it", text)
    return Limit(kind=kind, share=share, seconds=share * step_s, rank=slowest, evidence=evidence)


def _communication(ranks: Sequence[RankLoad], step_s: float) -> Limit | None:
    """Return how long even the rank that waits least sleeps in collectives."""
    waits = [rank.wait_share for rank in ranks if not rank.on_gpu]
    known = [share for share in waits if share is not None]
    if len(ranks) < 2 or len(known) < len(ranks):
        return None
    share = min(known)
    text = (
        f"every rank sleeps {100 * share:.0f} % of the time or more in collectives, "
        f"{share * step_s:.3g} s of each step"
    )
    kind = LimitKind.COMMUNICATION
    return Limit(kind=kind, share=share, seconds=share * step_s, evidence=(text,))


def _computing(ranks: Sequence[RankLoad], step_s: float) -> Limit:
    """Return whether the host or the device computes most of the time, as far as that is known."""
    if any(rank.on_gpu for rank in ranks):
        return _on_gpu(ranks, step_s)
    looks, slept = sum(rank.looks for rank in ranks), sum(rank.slept for rank in ranks)
    if looks + slept >= LEAST_BEATS and slept >= looks:
        text = f"the training thread slept in {100 * slept / (looks + slept):.0f} % of the looks"
        where = "ltui diagnose RUN --sample shows where"
        return _unknown(step_s, f"{text}, outside of collectives and its loader: {where}")
    if looks < LEAST_BEATS:
        return _unknown(step_s, "the training thread was seen too rarely outside of its waits")
    moved = sum(rank.moved for rank in ranks) / looks
    text = (
        f"in {100 * moved:.0f} % of {looks} looks the training thread was in another place of the "
        "program after 0.5 ms of work"
    )
    if moved >= SMALL_OPERATORS:
        text = f"many small operators: {text}"
        return Limit(kind=LimitKind.HOST, seconds=step_s, evidence=(text,))
    if moved <= LARGE_OPERATORS:
        return Limit(kind=LimitKind.DEVICE, seconds=step_s, evidence=(f"large operators: {text}",))
    return _unknown(step_s, f"operators of all sizes: {text}")


def _on_gpu(ranks: Sequence[RankLoad], step_s: float) -> Limit:
    readings = [rank.gpu_percent for rank in ranks if rank.gpu_percent is not None]
    if not readings:
        return _unknown(step_s, "there are no readings of the GPUs")
    busy = median(readings)
    text = f"the GPUs run kernels {busy:.0f} % of the time"
    if busy <= IDLE_GPU:
        idle_s = (1 - busy / 100) * step_s
        return Limit(kind=LimitKind.HOST, share=1 - busy / 100, seconds=idle_s, evidence=(text,))
    if busy >= BUSY_GPU and len(ranks) == 1:
        return Limit(kind=LimitKind.DEVICE, seconds=step_s, evidence=(text,))
    if busy >= BUSY_GPU:
        return _unknown(step_s, f"{text}; whether they compute or communicate, a profile tells")
    return _unknown(step_s, text)


def _unknown(step_s: float, why: str) -> Limit:
    return Limit(kind=LimitKind.UNKNOWN, seconds=step_s, evidence=(why,))
