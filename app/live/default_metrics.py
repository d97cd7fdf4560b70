"""The metrics that are loaded and drawn until a person chooses others. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ltui.app.live.curve_arithmetic import STEP_CURVES
from ltui.training.state.metric_name_patterns import GOALS, TRAIN_LOSS, is_evaluation

MAX_DEFAULT_METRICS = 5
"""Maximum number of metrics in the default choice."""


def default_choice(names: Collection[str]) -> tuple[str, ...]:
    """Return the metrics shown by default, usually the loss of training and of validation.

    If no loss is logged, or a reward is logged, the choice is what the script optimises instead.
    """
    logged = sorted(name for name in names if name not in STEP_CURVES or name == TRAIN_LOSS)
    for goal in GOALS:
        matches = [
            name for name in logged if goal.search(name) and not _is_part_of_loss(name, goal)
        ]
        if matches:
            return _training_first(matches)[:MAX_DEFAULT_METRICS]
    return tuple(logged[:1])


def _is_part_of_loss(name: str, goal: re.Pattern[str]) -> bool:
    """Return whether another goal is only named inside a loss, as in ``reward_model_loss``."""
    return "loss" in name.lower() and goal.pattern != "loss"


def _training_first(names: Iterable[str]) -> tuple[str, ...]:
    """Return one training curve, per step if there is one, then the curves of validation."""
    names = list(names)
    training = [name for name in names if not is_evaluation(name)]
    stepwise = [n for n in training if "epoch" not in n.lower()]
    named = [n for n in stepwise if "train" in n.lower()]
    first = [TRAIN_LOSS] if TRAIN_LOSS in training else (named or stepwise or training)[:1]
    return (*first, *(name for name in names if is_evaluation(name)))
