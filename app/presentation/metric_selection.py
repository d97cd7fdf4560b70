"""Which metrics the first chart shows: the default choice, and how they share charts. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from ltui.app.live.metric_history import STEP_CURVES
from ltui.training.state.metric_names import DATA_SPLIT, GOALS, TRAIN_LOSS, VALIDATION

MAX_DEFAULT_METRICS = 5
DESCRIPTIONS = {
    TRAIN_LOSS: "loss of each step",
    "step/lr": "learning rate",
    "step/seconds": "seconds of a step",
    "step/fetch_seconds": "seconds waiting for data",
    "step/forward_seconds": "seconds in forward",
    "step/backward_seconds": "seconds in backward",
    "step/optimizer_seconds": "seconds in the optimizer",
    "step/samples": "samples of a batch",
    "step/memory_bytes": "memory allocated on the GPU",
}


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


def metric_quantity(name: str) -> str:
    """The name without what says on which part of the data: ``val/loss`` -> ``loss``."""
    rest = DATA_SPLIT.sub("", name).strip("/_.- ")
    for ending in ("_epoch", "_step"):
        rest = rest.removesuffix(ending)
    return rest.lower() or name


def chart_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that share a chart, because they are the same quantity and so on the same scale."""
    by_quantity: dict[str, list[str]] = {}
    for name in names:
        by_quantity.setdefault(metric_quantity(name), []).append(name)
    return [tuple(group) for group in by_quantity.values()]


def matching(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    """Names that contain ``pattern``, or match it if it holds ``*`` or ``?``; case is ignored."""
    wanted = pattern.strip().lower()
    if any(sign in wanted for sign in "*?"):
        return tuple(name for name in names if fnmatchcase(name.lower(), wanted))
    return tuple(name for name in names if wanted in name.lower())


def preference_key(preset: str | None, command: Sequence[str] | None) -> str:
    """Under which a choice is remembered: the preset, or the script that a command runs."""
    if preset:
        return preset
    words = command or ()
    return next((word for word in words if word.endswith(".py")), words[0] if words else "")
