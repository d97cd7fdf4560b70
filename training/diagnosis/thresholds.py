"""Time budgets: how long a rank may make no progress before it is a suspect or stalled. Pure.

The budget of a training step follows the run's own recent steps. Phases that may take long (setup,
compilation, the first steps, validation, checkpoints) get the budget of slow phases. If other ranks
wait for a rank that is observed to be frozen, a few seconds are enough, unless the phase has taken
longer before.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_high

from ltui.training.config.run_spec import StallPolicy
from ltui.training.shared.record_types import STEP_PHASES, Phase, PulseState
from ltui.training.state.record_fold import FoldState, RankFold

WARM_UP_STEPS = 3
"""First steps of a rank, which compile, allocate and connect, and get the slow phases' budget."""
FIRST_BATCH_BUDGET_S = 30.0
"""Minimum budget in seconds of an epoch's first batch, for which loader workers start."""
FROZEN_BUDGET_S = 7.0
"""Minimum budget in seconds of a frozen rank in a slow phase, if other ranks wait for it."""
BUSY_BUDGET_S = 7.5
"""Minimum budget in seconds of a rank that computes on one line while others wait."""
_BUSY_CPU_S = 2.5
"""Minimum CPU seconds of such a rank, because wall time says little on an overloaded machine."""
_MINIMUM_CPU_SHARE = 0.05
"""Lower bound of the fraction of a core by which ``_BUSY_CPU_S`` is divided."""
WARM_UP_BUDGET_S = 30.0
"""Minimum budget in seconds of a rank that works while others wait, in its first steps (allocating,
connecting), in setup, in validation or at the end of an epoch (reading an index, scoring)."""
_COMPILING_BUDGET_S, _COMPILING_STARVED_BUDGET_S = 60.0, 240.0
"""Budget in seconds of a rank that compiles while others wait: with a processor, and while other
processes use it most of the time."""
MOVING_BUDGET_S = 6.5
"""Minimum budget in seconds of a rank that works in a training step while others wait."""
CHECKPOINT_BUDGET_S = 8.0
"""Minimum budget in seconds of a rank that writes a checkpoint while others wait."""
FAULT_SETTLE_S = 2.2
"""Seconds without progress after which a fault that cannot mend itself is reported. Until then the
flight recorders of the ranks may not have recorded the same collectives."""
_LONG_STEPS = 2.0
"""Minimum of the policy's cap, in lengths of the slowest recent step. A shorter cap would accuse
every step. The slow phases' budget limits it, because one stalled step must not hide the next."""
EXIT_BUDGET_S = 12.0
"""Seconds after which a finished rank that computes nothing should have exited."""
_MINIMUM_EVIDENCE_DUE_S, _MAXIMUM_EVIDENCE_DUE_S = 1.2, 12.0
"""Bounds in seconds without progress before evidence of a training step is collected."""
REPEATED_EVIDENCE_DUE_S = 0.9
"""Seconds before evidence is collected of a rank whose previous step was already far too long."""
_EVIDENCE_DUE_SHARE = 0.35
"""Fraction of a training step's budget after which evidence is collected."""
SLOW_PHASE_EVIDENCE_DUE_S = 3.5
"""Seconds without progress before evidence is collected outside of known training steps."""
_SLOW_STEP_S = 2.5
"""Minimum length in seconds of a slow step, if the steps before it were short."""
_SLOW_STEP_FACTOR = 4
"""Minimum length of a slow step, in lengths of the median step before it."""


def budget_s(
    pulse: PulseState | None, rank: RankFold | None, policy: StallPolicy, slowest_s: float | None
) -> float:
    """Return the seconds that a rank may make no progress before it counts as overdue."""
    slow_phase_s = max(policy.slow_phase_s, policy.floor_s)
    if not in_known_step(pulse, rank, slowest_s):
        return slow_phase_s
    budget = step_budget_s(policy, slowest_s)
    if pulse is not None and rank is not None and pulse.batch <= 0:
        first_s = max(FIRST_BATCH_BUDGET_S, policy.factor * (rank.between_epochs_s or 0.0))
        return max(budget, min(first_s, slow_phase_s))
    return budget


def in_known_step(pulse: PulseState | None, rank: RankFold | None, slowest_s: float | None) -> bool:
    """Return True if the rank is in a training step and the length of earlier steps is known."""
    if pulse is None or pulse.phase not in STEP_PHASES or slowest_s is None:
        return False
    return warmed_up(rank)


def busy_budget_s(frozen_s: float, cpu_share: float | None) -> float:
    """Return the budget of a rank that computes on one line of a step while others wait.

    ``frozen_s`` is the budget that it would have if it were frozen, ``cpu_share`` the fraction of a
    core that it gets.
    """
    share = 1.0 if cpu_share is None else max(cpu_share, _MINIMUM_CPU_SHARE)
    return max(moving_budget_s(frozen_s), BUSY_BUDGET_S, _BUSY_CPU_S / share)


def compiling_budget_s(starved: bool) -> float:
    """Return the budget of a rank that compiles, whether or not other ranks wait for it."""
    return _COMPILING_STARVED_BUDGET_S if starved else _COMPILING_BUDGET_S


def moving_budget_s(frozen_s: float, minimum_s: float = MOVING_BUDGET_S) -> float:
    """Return the budget of a rank that works while others wait."""
    return max(minimum_s, 1.5 * frozen_s)


def warmed_up(rank: RankFold | None) -> bool:
    """Return True if the rank has completed its first, slower steps."""
    return rank is not None and rank.totals is not None and rank.totals.batches >= WARM_UP_STEPS


def step_budget_s(policy: StallPolicy, slowest_s: float | None) -> float:
    """Return the budget of a step after the warm-up; the slow phases' if no step is known."""
    if slowest_s is None:
        return policy.slow_phase_s
    maximum_s = max(policy.cap_s, min(_LONG_STEPS * slowest_s, policy.slow_phase_s))
    return max(policy.floor_s, min(maximum_s, policy.factor * slowest_s))


def frozen_budget_s(
    phase: Phase, policy: StallPolicy, slowest_s: float | None, longest_s: Mapping[Phase, float]
) -> float:
    """Return the budget of a frozen rank that others wait for, in any phase.

    ``longest_s`` holds the longest time that each phase has taken before.
    """
    learned_s = policy.factor * longest_s.get(phase, 0.0) if phase not in STEP_PHASES else 0.0
    step_s = step_budget_s(policy, slowest_s) if slowest_s is not None else 0.0
    in_step = phase in STEP_PHASES and slowest_s is not None
    minimum_s = policy.floor_s if in_step else FROZEN_BUDGET_S
    return min(max(minimum_s, learned_s, step_s), max(policy.cap_s, policy.slow_phase_s))


def evidence_due_s(
    pulse: PulseState, rank: RankFold | None, slowest_s: float | None, full_s: float
) -> float:
    """Return the seconds without progress after which to collect evidence.

    Collecting takes two seconds, so it begins before the budget ``full_s`` has passed.
    """
    if not in_known_step(pulse, rank, slowest_s):
        return SLOW_PHASE_EVIDENCE_DUE_S
    return max(_MINIMUM_EVIDENCE_DUE_S, min(_EVIDENCE_DUE_SHARE * full_s, _MAXIMUM_EVIDENCE_DUE_S))


def last_step_was_slow(rank: RankFold | None) -> bool:
    """Return True if the rank's last step took much longer than the steps before it."""
    if rank is None or len(rank.recent_step_s) < 6:
        return False
    *before, last = rank.recent_step_s
    return last >= max(_SLOW_STEP_S, _SLOW_STEP_FACTOR * median_high(before))


def slowest_step_s(fold: FoldState) -> float | None:
    """Return the slowest recent step of any rank in seconds, without the first steps of the run."""
    slowest_s = None
    for rank in fold.ranks.values():
        steps = rank.recent_step_s
        if rank.totals is not None and rank.totals.batches <= len(steps) + 1:
            steps = steps[WARM_UP_STEPS:] or steps[-1:]
        for seconds in steps:
            slowest_s = seconds if slowest_s is None else max(slowest_s, seconds)
    return slowest_s
