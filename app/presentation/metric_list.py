"""Names of metrics: descriptions, grouping into charts, and the filter of the metric list. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from ltui.training.state.metric_name_patterns import DATA_SPLIT, THROUGHPUT, TRAIN_LOSS

DESCRIPTIONS = {
    TRAIN_LOSS: "loss of each step, by ltui",
    "step/lr": "learning rate",
    "step/seconds": "seconds of a step",
    "step/fetch_seconds": "seconds waiting for data",
    "step/forward_seconds": "seconds in forward",
    "step/backward_seconds": "seconds in backward",
    "step/optimizer_seconds": "seconds in the optimizer",
    "step/samples": "samples of a batch",
    "step/memory_bytes": "allocated GPU memory",
    THROUGHPUT: "samples/s of all ranks",
}
"""Descriptions of the curves that every step has."""


class MetricChoice(Struct, frozen=True):
    """The metrics that a user chose for a panel; without names, the default choice."""

    names: tuple[str, ...] = ()
    joined: bool = False
    """Draw all of them in one chart."""
    every: bool = False
    """Draw every metric of the run as a small chart, in place of the named ones."""


def metric_quantity(name: str) -> str:
    """Return the name without the part of the data: ``loss`` for ``val/loss``."""
    quantity = DATA_SPLIT.sub("", name).strip("/_.- ")
    for ending in ("_epoch", "_step"):
        quantity = quantity.removesuffix(ending)
    return quantity.lower() or name


def chart_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return groups of names that share a chart, because they are the same quantity."""
    by_quantity: dict[str, list[str]] = {}
    for name in names:
        by_quantity.setdefault(metric_quantity(name), []).append(name)
    return [tuple(group) for group in by_quantity.values()]


def matching(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    """Return the names that contain ``pattern``, or match it if it has ``*`` or ``?``.

    A pattern between slashes, such as ``/loss$/``, is a regular expression; the last slash may be
    missing. Case is ignored. Raise ``ValueError`` if the expression is wrong; the text names the
    place.
    """
    wanted_pattern = pattern.strip()
    if wanted_pattern.startswith("/"):
        expression = _compiled(wanted_pattern)
        return tuple(name for name in names if expression.search(name))
    wanted_pattern = wanted_pattern.lower()
    if any(sign in wanted_pattern for sign in "*?"):
        return tuple(name for name in names if fnmatchcase(name.lower(), wanted_pattern))
    return tuple(name for name in names if wanted_pattern in name.lower())


def _compiled(pattern: str) -> re.Pattern[str]:
    expression = pattern[1:].removesuffix("/")
    try:
        return re.compile(expression, re.IGNORECASE)
    except re.error as error:
        # Count from one, with the slash: so the user counts in the field.
        place = f" at character {error.pos + 2}" if error.pos is not None else ""
        raise ValueError(f"The expression is wrong{place}: {error.msg}.") from None


def preference_key(preset: str | None, command: Sequence[str] | None) -> str:
    """Return the key under which a choice is stored: the preset, or the script of a command."""
    if preset:
        return preset
    words = command or ()
    return next((word for word in words if word.endswith(".py")), words[0] if words else "")
