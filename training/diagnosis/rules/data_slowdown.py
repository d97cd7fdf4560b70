"""All ranks are slower than before because they wait for data, and no rank is to blame. Pure."""

from __future__ import annotations

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis.judge_input import PreparedInput, position_facts
from ltui.training.diagnosis.thresholds import FAULT_SETTLE_S, last_step_was_slow
from ltui.training.shared.record_types import Phase
from ltui.training.state.record_fold import RankFold
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdict_kinds import VerdictKind

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
