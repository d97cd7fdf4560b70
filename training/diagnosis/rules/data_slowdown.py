"""All ranks at once slower than they were, for want of data: slow, and nobody's fault. Pure."""

from __future__ import annotations

from ltui.training.diagnosis.rules.judge_input import PreparedInput, position_facts
from ltui.training.diagnosis.rules.thresholds import FAULT_SETTLE_S
from ltui.training.state.record_fold import RankFold
from ltui.training.state.run_snapshot import Verdict
from ltui.training.tensor_queue.record_types import Phase

_LEAST_S = 2.5
_TIMES = 4.0
_SHARE = 0.6


def slow_data_verdict(m: PreparedInput) -> Verdict | None:
    """Every rank's last step was several times as long as usual, most of it waiting for data, and
    every rank waits for data again."""
    alive = m.alive
    stands = any(v.kind == "slow_data" for v in m.history.active.values())
    again = all(p.phase is Phase.FETCH and m.still[r] > FAULT_SETTLE_S for r, p in alive.items())
    if not alive or not (again or stands):
        return None
    shares = [_share_of_slow_step(m.fold.ranks.get(r)) for r in alive]
    known = [share for share in shares if share is not None]
    if len(known) < len(alive) or min(known) < _SHARE:
        return None
    last_s = max(m.fold.ranks[r].recent_step_s[-1] for r in alive)
    who = "all ranks" if len(alive) > 1 else f"rank {next(iter(alive))}"
    return Verdict(
        kind="slow_data",
        level="slow",
        waiting=tuple(sorted(alive)),
        place=Phase.FETCH.label,
        cause=(
            f"{who} {'are' if len(alive) > 1 else 'is'} data-bound:"
            f" {100 * min(known):.0f} % of the last step ({last_s:.1f} s) was spent waiting for"
            " data, several times longer than before; training continues slowly"
        ),
        remedy="Check the storage, use more DataLoader workers, or cheaper samples.",
        confidence=0.8,
        evidence={
            "step_s": last_s,
            "moving": True,
            "ranks": {str(r): position_facts(p) for r, p in alive.items()},
        },
    )


def _share_of_slow_step(folded: RankFold | None) -> float | None:
    """The share of the last step that was spent in waiting for data; None where that step was not
    slow, or is not known."""
    if folded is None or folded.totals is None or len(folded.recent_step_s) < 6:
        return None
    *before, last = folded.recent_step_s
    usual = sorted(before)[len(before) // 2]
    if last < max(_LEAST_S, _TIMES * usual):
        return None
    total = folded.totals
    earlier = [mark for mark in folded.recent_totals if total.t_ns - mark.t_ns > 0.5e9 * last]
    if not earlier or total.timed_s <= earlier[-1].timed_s:
        return None
    return (total.fetch_s - earlier[-1].fetch_s) / (total.timed_s - earlier[-1].timed_s)
