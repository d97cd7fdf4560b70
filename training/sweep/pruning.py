"""When a trial is not worth its time yet. Pure: numbers of which lower ones are better.

A rung is a number of steps at which trials are compared. Rungs count steps of training, never
attempts, so that a trial that was stopped and resumed is compared like any other one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

RULES = ("asha", "median")
LEAST_FOR_MEDIAN = 4
"""Number of trials with a score at a rung, from which on the median stops one."""


def rung_steps(rule: str, first: int, reduction: int, number: int) -> int:
    """Return the steps of a rung; numbers count from 0.

    The rungs of ASHA lie further and further apart (``first * reduction ** number``), those of the
    median at equal distances.
    """
    return first * (reduction**number if rule == "asha" else number + 1)


def survives(rule: str, score: float, scores: Sequence[float], reduction: int) -> bool:
    """Return whether a trial goes on after a rung at which ``scores`` are those of all trials.

    ``asha``: it is among the best ``len(scores) // reduction``, but at least the best one. The rule
    is that of Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020,
    algorithm 2). There every trial waits at each rung; here one that is good enough at once goes
    on without a stop, as in Optuna's ``SuccessiveHalvingPruner``.

    ``median``: it is not worse than the median of the others, as in Golovin et al., "Google Vizier"
    (KDD 2017, section 3.2.2), with the score at the rung in place of the running average.

    The judgement of a stopped trial may change when others have arrived: then it is resumed.
    """
    if rule == "asha":
        ranked = sorted(scores)
        return score <= ranked[max(1, len(ranked) // reduction) - 1]
    others = list(scores)
    others.remove(score)
    return len(others) < LEAST_FOR_MEDIAN or score <= median(others)


def comparable(score: float, mode: str) -> float:
    """Return a score of which lower is better; the worst of all for NaN."""
    return math.inf if math.isnan(score) else score if mode == "min" else -score


def goes_on(
    rule: str,
    reduction: int,
    passed: int,
    own: Mapping[int, float],
    others: Sequence[Mapping[int, float]],
) -> bool:
    """Return whether a trial survives every rung after ``passed``, the steps up to which it was
    judged before: what it has passed once, later trials do not take from it.

    ``own`` and ``others`` are scores by the steps of the rung. A rung without a score is passed.
    """
    for steps, score in own.items():
        scores = [score, *(one[steps] for one in others if steps in one)]
        if steps > passed and not survives(rule, score, scores, reduction):
            return False
    return True
