"""The metrics that are loaded and drawn until a person chooses others. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ltui.app.live.metric_history import STEP_CURVES
from ltui.training.state.metric_names import GOALS, TRAIN_LOSS, VALIDATION

MAX_DEFAULT_METRICS = 5


def is_validation(name: str) -> bool:
    return VALIDATION.search(name) is not None


def default_choice(names: Collection[str]) -> tuple[str, ...]:
    """What is shown until a person chooses: the loss of training and validation, say.

    Without a loss, or where a reward is logged, that is what the script improves instead.
    """
    logged = sorted(name for name in names if name not in STEP_CURVES or name == TRAIN_LOSS)
    for goal in GOALS:
        found = [name for name in logged if goal.search(name) and not _is_part_of_loss(name, goal)]
        if found:
            return _training_first(found)[:MAX_DEFAULT_METRICS]
    return tuple(logged[:1])


def _is_part_of_loss(name: str, goal: re.Pattern[str]) -> bool:
    """Whether a goal other than the loss is named within a loss: ``reward_model_loss``."""
    return "loss" in name.lower() and goal.pattern != "loss"


def _training_first(names: Iterable[str]) -> tuple[str, ...]:
    """One training curve, the one of every step if there is one; then those of validation."""
    names = list(names)
    training = [name for name in names if not is_validation(name)]
    stepwise = [n for n in training if "epoch" not in n.lower()]
    named = [n for n in stepwise if "train" in n.lower()]
    first = [TRAIN_LOSS] if TRAIN_LOSS in training else (named or stepwise or training)[:1]
    return (*first, *(name for name in names if is_validation(name)))
