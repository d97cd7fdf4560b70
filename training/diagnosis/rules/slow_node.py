"""Find what slows many ranks alike: their machine, or the data that they all wait for. Pure.

All ranks of one machine share its processors, its storage and its room. So if all of them are slow,
the cause is to be looked for there and not in one rank. Work is measured as for a straggler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median_high

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis.judge_input import PreparedInput, position_facts
from ltui.training.diagnosis.rules.straggler import (
    MINIMUM_LOSS_S,
    PARTS,
    OwnWork,
    Slow,
    Span,
    WorkByRank,
)
from ltui.training.diagnosis.stalls.stall_case import SLOWING, gpu_cause
from ltui.training.diagnosis.stalls.stall_causes import STARVED_REMEDY
from ltui.training.diagnosis.thresholds import FAULT_SETTLE_S, last_step_was_slow
from ltui.training.shared.record_types import Phase
from ltui.training.state.record_fold import RankFold
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdicts import VerdictKind

_CLEAR_SHARE = 0.5
"""Minimum fraction of the loss by which the machine is slower than the next slowest one too."""
_KEPT_FACTOR = 0.5
"""Fraction of the minimum shares at which a machine that is reported stays reported."""
_CROWDED_DELAY = 0.3
"""Minimum fraction of time that every rank of a crowded machine waits for a processor."""
_OVERLOADED = 1.2
"""Minimum load of an overloaded machine, as a multiple of its cores."""
_REASONS = {
    "fetch data": (
        "its data is slow",
        "Check the storage of that machine (mount, network, cache), or give its ranks more"
        " DataLoader workers.",
    ),
    "forward": (
        "its computation is slow",
        "Check the clocks, temperature and power limit of its GPUs, and other processes on it.",
    ),
}
"""part of a step -> (reason, remedy) if nothing more specific is known."""


def slow_node_verdict(inputs: PreparedInput, spans: Sequence[Span]) -> Verdict | None:
    """Return a verdict on the machine that holds up the others, or None."""
    if not inputs.machines:
        return None

    def compare(work: WorkByRank) -> Slow | None:
        return _compare(work, inputs.node_of)

    for span in spans:
        if (slow := span.find(compare)) is not None:
            return _verdict(inputs, slow)
    reported = inputs.history.active_of(VerdictKind.SLOW_NODE)
    for span in spans if reported is not None else ():
        kept = span.find(compare, _KEPT_FACTOR)
        if kept is not None and reported is not None and reported.nodes == (kept.subject,):
            return reported
    return None


def _compare(work_by_rank: WorkByRank, node_of: Mapping[int, int]) -> Slow | None:
    """Return the machine whose fastest rank works most, compared with all ranks elsewhere.

    Return None unless it has two ranks or more: a single slow rank is a straggler.
    """
    by_node: dict[int, dict[int, OwnWork]] = {}
    for rank, work in work_by_rank.items():
        if work is None or rank not in node_of:
            return None
        by_node.setdefault(node_of[rank], {})[rank] = work
    if len(by_node) < 2:
        return None
    fastest_s = {n: min(sum(w.parts_s) for w in works.values()) for n, works in by_node.items()}
    slowest = max(fastest_s, key=lambda n: fastest_s[n])
    own, others = (
        by_node[slowest],
        [w for n in by_node if n != slowest for w in by_node[n].values()],
    )
    middle_s = median_high(sum(w.parts_s) for w in others)
    step_s = max(w.step_s for works in by_node.values() for w in works.values())
    loss_s = fastest_s[slowest] - middle_s
    next_s = max(s for n, s in fastest_s.items() if n != slowest)
    is_clear = fastest_s[slowest] - next_s >= _CLEAR_SHARE * loss_s
    if len(own) < 2 or step_s <= 0 or loss_s < MINIMUM_LOSS_S or not is_clear:
        return None
    excess_s = [
        mean(w.parts_s[i] for w in own.values()) - median_high(w.parts_s[i] for w in others)
        for i in range(len(PARTS))
    ]
    return Slow(
        subject=slowest,
        ranks=tuple(sorted(own)),
        share=loss_s / step_s,
        step_s=step_s,
        part=PARTS[excess_s.index(max(excess_s))],
        own_s=mean(sum(w.parts_s) for w in own.values()),
        middle_s=middle_s,
    )


def _verdict(inputs: PreparedInput, slow: Slow) -> Verdict:
    name = inputs.machines[slow.ranks[0]]
    reason, remedy = _reason(inputs, slow)
    return Verdict(
        kind=VerdictKind.SLOW_NODE,
        level=VerdictLevel.SLOW,
        nodes=(slow.subject,),
        culprits=slow.ranks,
        waiting=tuple(sorted(inputs.alive.keys() - {*slow.ranks})),
        place=f"machine {name}, {slow.part}",
        cause=(
            f"machine {name} is slower than the others: each of its {len(slow.ranks)} ranks works"
            f" {slow.own_s:.2f} s in a step, mostly longer in {slow.part}, a rank elsewhere"
            f" {slow.middle_s:.2f} s, so the others wait {100 * slow.share:.0f} % of each step"
            f" ({slow.step_s:.2f} s): {reason}"
        ),
        remedy=remedy,
        confidence=0.8,
        evidence={
            **slow.facts,
            "ranks": position_facts(inputs.pulses_of(slow.ranks)),
        },
    )


def _reason(inputs: PreparedInput, slow: Slow) -> tuple[str, str]:
    """Return why the machine is slow, and a remedy."""
    host = inputs.hosts.get(slow.subject)
    delays = [inputs.cpu_delays.get(r, 0.0) for r in slow.ranks]
    load, cores = (host.load, host.cores) if host is not None else (None, None)
    if load is not None and cores is not None and load > _OVERLOADED * cores:
        return f"it has a load of {load:.0f} on {cores} cores", STARVED_REMEDY
    if min(delays) >= _CROWDED_DELAY:
        return "other processes use its processors", STARVED_REMEDY
    causes = (gpu_cause(inputs.gpu_verdicts, (rank,), SLOWING) for rank in slow.ranks)
    cause = next((cause for cause in causes if cause is not None), None)
    if cause is not None and slow.part != "fetch data":
        return cause.text, cause.remedy
    return _REASONS.get(slow.part, _REASONS["forward"])


_DATA_SHARE = 0.6
"""Minimum fraction of a slow step that every rank waits for data."""


def slow_data_verdict(inputs: PreparedInput) -> Verdict | None:
    """Return a verdict if data slow down all ranks, or None.

    The last step of every rank was several times as long as usual, most of it was spent waiting for
    data, and every rank waits for data again.
    """
    alive = inputs.alive
    active = inputs.history.active_of(VerdictKind.SLOW_DATA) is not None
    waits_again = all(
        p.phase is Phase.FETCH and inputs.still_s[r] > FAULT_SETTLE_S for r, p in alive.items()
    )
    if not alive or not (waits_again or active):
        return None
    shares = [
        share
        for r in alive
        if (share := _data_share_of_slow_step(inputs.fold.ranks.get(r))) is not None
    ]
    if len(shares) < len(alive) or min(shares) < _DATA_SHARE:
        return None
    last_s = max(inputs.fold.ranks[r].recent_step_s[-1] for r in alive)
    ranks = "all ranks are" if len(alive) > 1 else f"{inputs.ranks_text((next(iter(alive)),))} is"
    return Verdict(
        kind=VerdictKind.SLOW_DATA,
        level=VerdictLevel.SLOW,
        waiting=tuple(sorted(alive)),
        place=Phase.FETCH.label,
        cause=(
            f"{ranks} data-bound:"
            f" {100 * min(shares):.0f} % of the last step ({last_s:.1f} s) was spent waiting for"
            " data, several times longer than before; training continues slowly"
        ),
        remedy="Check the storage, use more DataLoader workers, or cheaper samples.",
        confidence=0.8,
        evidence={
            "step_s": last_s,
            "moving": True,
            "ranks": position_facts(alive),
        },
    )


def _data_share_of_slow_step(rank_fold: RankFold | None) -> float | None:
    """Return the fraction of the last step that was spent waiting for data.

    Return None if that step was not slow, or if its parts are unknown.
    """
    if rank_fold is None or rank_fold.totals is None or not last_step_was_slow(rank_fold):
        return None
    end = rank_fold.totals
    earlier = [
        mark
        for mark in rank_fold.recent_totals
        if end.t_ns - mark.t_ns > 0.5e9 * rank_fold.recent_step_s[-1]
    ]
    if not earlier or end.timed_s <= earlier[-1].timed_s:
        return None
    return (end.fetch_s - earlier[-1].fetch_s) / (end.timed_s - earlier[-1].timed_s)
