"""How long a rank may stay where it is before that is suspicious, and before it is a stall. Pure.

A training step's budget follows the run's own recent steps. What takes long by nature (setup,
compilation, the first steps, validation, checkpoints) gets the slow phases' budget, unless other
ranks wait for a rank that is seen to be frozen: then a few seconds will do, and whatever the phase
has taken before.
"""

from __future__ import annotations

from collections.abc import Mapping

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.rules.judge_input import STEP_PHASES
from ltui.training.state.record_fold import FoldState, RankFold
from ltui.training.tensor_queue.record_types import Phase, PulseState

WARM_UP_STEPS = 3
"""A rank's first steps compile, allocate and connect: they get the slow phases' budget."""
FIRST_BATCH_BUDGET_S = 30.0
"""Least budget of an epoch's first batch, where loader workers start."""
FROZEN_BUDGET_S = 7.0
"""Others wait for a frozen rank in a slow phase: so long at least."""
BUSY_BUDGET_S = 7.5
"""A rank that computes on one line while others wait: so long at least."""
_BUSY_CPU_S = 2.5
"""And so much of a processor's time: on a crowded machine that takes longer."""
_LEAST_CPU_SHARE = 0.05
WARM_UP_BUDGET_S = 30.0
"""What computes or moves while others wait, in a rank's first steps (allocating, connecting), in
setup, validation or at an epoch's end (reading an index, scoring)."""
_COMPILING_S, _COMPILING_STARVED_S = 60.0, 240.0
"""A rank that compiles while others wait: with a processor, and mostly without one."""
MOVING_BUDGET_S = 6.5
"""A rank that moves while others wait, in a training step."""
CHECKPOINT_BUDGET_S = 8.0
"""Ranks wait for one that moves through a checkpoint."""
FAULT_SETTLE_S = 2.2
"""Ranks stand in collectives that can never match: so long, for the flight recorders to settle."""
_LONG_STEPS = 2.0
"""A policy's cap shorter than this many steps would accuse every one of them. One step that was a
stall must not hide the next: the slow phases' budget is the most."""
EXIT_BUDGET_S = 12.0
"""A rank that has finished, computes nothing and does not exit: so long at least."""
_LOOK_S = 1.2
REPEATED_EVIDENCE_DUE_S = 0.9
"""A rank whose step before was already far too long is looked at so soon."""
_LOOK_SHARE = 0.35
SLOW_PHASE_EVIDENCE_DUE_S = 3.5


def budget_s(
    pulse: PulseState | None, rank: RankFold | None, policy: StallPolicy, slowest_s: float | None
) -> float:
    """Seconds that the rank may stay where it is before it counts as overdue."""
    slow_s = max(policy.slow_phase_s, policy.floor_s)
    if not in_known_step(pulse, rank, slowest_s):
        return slow_s
    assert pulse is not None
    assert rank is not None
    assert slowest_s is not None
    budget = step_budget_s(policy, slowest_s)
    if pulse.batch <= 0:
        first_s = max(FIRST_BATCH_BUDGET_S, policy.factor * (rank.between_epochs_s or 0.0))
        return max(budget, min(first_s, slow_s))
    return budget


def in_known_step(pulse: PulseState | None, rank: RankFold | None, slowest_s: float | None) -> bool:
    """Whether the rank is in a training step whose length is known from others before it."""
    if pulse is None or pulse.phase not in STEP_PHASES or slowest_s is None:
        return False
    return warmed_up(rank)


def busy_budget_s(frozen_s: float, cpu_share: float | None) -> float:
    """Budget of a rank that computes on one line of a step while others wait, whose frozen rank
    would have ``frozen_s``."""
    share = 1.0 if cpu_share is None else max(cpu_share, _LEAST_CPU_SHARE)
    return max(moving_budget_s(frozen_s), BUSY_BUDGET_S, _BUSY_CPU_S / share)


def compiling_budget_s(starved: bool) -> float:
    """Budget of a rank that compiles, whether or not others wait."""
    return _COMPILING_STARVED_S if starved else _COMPILING_S


def moving_budget_s(frozen_s: float, least_s: float = MOVING_BUDGET_S) -> float:
    """Budget of a rank that moves while others wait."""
    return max(least_s, 1.5 * frozen_s)


def warmed_up(rank: RankFold | None) -> bool:
    return rank is not None and rank.totals is not None and rank.totals.batches >= WARM_UP_STEPS


def step_budget_s(policy: StallPolicy, slowest_s: float | None) -> float:
    """Of a step past the warm-up; the slow phases' where no step is known."""
    if slowest_s is None:
        return policy.slow_phase_s
    most_s = max(policy.cap_s, min(_LONG_STEPS * slowest_s, policy.slow_phase_s))
    return max(policy.floor_s, min(most_s, policy.factor * slowest_s))


def frozen_budget_s(
    phase: Phase, policy: StallPolicy, slowest_s: float | None, longest_s: Mapping[Phase, float]
) -> float:
    """Budget of a frozen rank that others wait for, in whatever phase."""
    learned = policy.factor * longest_s.get(phase, 0.0) if phase not in STEP_PHASES else 0.0
    step_s = step_budget_s(policy, slowest_s) if slowest_s is not None else 0.0
    least = policy.floor_s if phase in STEP_PHASES and slowest_s is not None else FROZEN_BUDGET_S
    return min(max(least, learned, step_s), max(policy.cap_s, policy.slow_phase_s))


def evidence_due_s(
    pulse: PulseState, rank: RankFold | None, slowest_s: float | None, full_s: float
) -> float:
    """When to look closely, which takes two seconds."""
    if not in_known_step(pulse, rank, slowest_s):
        return SLOW_PHASE_EVIDENCE_DUE_S
    return max(_LOOK_S, min(_LOOK_SHARE * full_s, 12.0))


def slowest_step_s(fold: FoldState) -> float | None:
    """The slowest recent step of any rank, but for the first steps of the run."""
    slowest = None
    for rank in fold.ranks.values():
        steps = rank.recent_step_s
        if rank.totals is not None and rank.totals.batches <= len(steps) + 1:
            steps = steps[WARM_UP_STEPS:] or steps[-1:]
        for seconds in steps:
            slowest = seconds if slowest is None else max(slowest, seconds)
    return slowest
