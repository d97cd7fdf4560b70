"""Which metrics the first chart shows: the default choice, and how they share charts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ltui.training.state.metric_names import DATA_SPLIT, TRAIN_LOSS

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
    wanted_pattern = pattern.strip().lower()
    if any(sign in wanted_pattern for sign in "*?"):
        return tuple(name for name in names if fnmatchcase(name.lower(), wanted_pattern))
    return tuple(name for name in names if wanted_pattern in name.lower())


def preference_key(preset: str | None, command: Sequence[str] | None) -> str:
    """Under which a choice is remembered: the preset, or the script that a command runs."""
    if preset:
        return preset
    words = command or ()
    return next((word for word in words if word.endswith(".py")), words[0] if words else "")
