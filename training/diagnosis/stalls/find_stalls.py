"""Find the ranks that make no progress, and the reason. Pure.

1. Ranks without progress for a first, short time are suspects: evidence of them is to be collected.
2. With evidence, the first unfinished collective decides. Ranks that enqueued something that cannot
   match are a mismatch. Ranks that did not come to it are the culprits, and each is explained by
   its process, workers and stack. If all came, the transport is at fault.
3. The budget depends on the reason: none for a fault that cannot mend itself, that of a step for a
   frozen rank, and more for a rank that works.
4. Without evidence, the pulses alone show which rank is furthest behind.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stalls import (
    collective_mismatch,
    lost_machines,
    missing_ranks,
    no_rank_waits,
)
from ltui.training.diagnosis.stalls.stall_case import StallCase, build_case, find_suspects
from ltui.training.state.run_snapshot import Verdict

Rule = Callable[[StallCase], list[Verdict] | None]
"""Returns None if it does not apply. An empty list means that nothing is to be reported yet."""

RULES: tuple[Rule, ...] = (
    missing_ranks.incomplete_rendezvous,
    collective_mismatch.mismatched_collective,
    missing_ranks.missing_ranks,
    collective_mismatch.finished_early,
    collective_mismatch.rank_died,
    lost_machines.unobserved_ranks,
    collective_mismatch.all_ranks_wait,
    no_rank_waits.no_rank_waits,
    missing_ranks.furthest_behind,
)
"""The stall rules in the order in which they are tried. The first one that applies decides."""


class Stalls(Struct, frozen=True, kw_only=True):
    """Which ranks make no progress, and what is wrong with them."""

    verdicts: tuple[Verdict, ...] = ()
    suspects: frozenset[int] = frozenset()
    """Ranks of which evidence is to be collected."""
    waiting: frozenset[int] = frozenset()
    """Ranks that wait for others."""


def find_stalls(inputs: PreparedInput, slowest_step_s: float | None) -> Stalls:
    """Apply the stall rules to the ranks; ``slowest_step_s`` is the slowest recent step."""
    if inputs.ended and not inputs.alive and not inputs.silent_s:
        lingering = no_rank_waits.lingering_ranks(inputs)
        verdicts = no_rank_waits.not_exiting(inputs, lingering)
        return Stalls(verdicts=tuple(verdicts), suspects=lingering)
    suspects = find_suspects(inputs, slowest_step_s)
    if not suspects:
        return Stalls()
    case = build_case(inputs, slowest_step_s)
    verdicts = _first_answer(case)
    waiting = {r for v in verdicts for r in v.waiting}
    if not verdicts and case.overdue:
        waiting = {*case.overdue} - missing_ranks.ranks_furthest_behind(inputs)
    return Stalls(verdicts=tuple(verdicts), suspects=suspects, waiting=frozenset(waiting))


def _first_answer(case: StallCase) -> list[Verdict]:
    """Return the verdicts of the first rule that applies."""
    for rule in RULES:
        verdicts = rule(case)
        if verdicts is not None:
            return verdicts
    return []
