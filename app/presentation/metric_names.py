"""Names of metrics: their order, the one that represents a run, grouping and filters. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from ltui.training.state.metric_name_patterns import (
    DATA_SPLIT,
    GOALS,
    INCIDENTAL,
    LOWER_IS_BETTER,
    SCORE,
    THROUGHPUT,
    TRAIN_LOSS,
    TRAIN_LOSS_ALIASES,
    better_direction,
    is_evaluation,
    is_training_loss,
)
from ltui.training.state.run_snapshot import MetricValue, RunSnapshot
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import LogLine

MEASURED_LOSS = "loss of each step, measured by ltui"
"""What ``train/loss`` is in a program that logs no loss."""
_TEST = re.compile(r"(^|[/_.\- ])test", re.IGNORECASE)
_OTHERS = 4
"""Class of the metrics that are neither of validation nor a training loss."""


class HeadlineMetric(Struct, frozen=True):
    """A metric and its last value."""

    name: str
    """The name as logged; ``loss`` for every usual name of the training loss."""
    value: float

    @property
    def lower_is_better(self) -> bool:
        return bool(LOWER_IS_BETTER.search(self.name))


def headline_first(names: Iterable[str]) -> list[str]:
    """Return metrics of validation, its loss first, then the training loss, then the others.

    In each class they stay in their order.
    """
    return sorted(names, key=_class)


def ordered_metrics(snapshot: RunSnapshot) -> list[tuple[str, MetricValue]]:
    """Return the metrics, the main one first, and the last ones in the order of their logging."""
    return [(name, snapshot.metrics[name]) for name in headline_first(snapshot.metrics)]


def headline_metric(run: RunSnapshot) -> HeadlineMetric | None:
    """Return the main metric: of validation, else the training loss, else a score or another."""
    names = headline_first(run.metrics)
    if not names:
        return None
    name = names[0] if _class(names[0])[0] < _OTHERS else min(names, key=_informative)
    short = "loss" if name.lower() in TRAIN_LOSS_ALIASES else name
    return HeadlineMetric(short, run.metrics[name].last)


def _class(name: str) -> tuple[int, int]:
    if is_evaluation(name):
        # Nothing is chosen by the test data.
        is_test = bool(_TEST.search(name))
        kind = 0 if "loss" in name.lower() else 1 if better_direction(name) else 2
        return (kind, is_test)
    if is_training_loss(name):
        return (3, 0 if name.lower() in TRAIN_LOSS_ALIASES else 1)
    return (_OTHERS, 0)


def _informative(name: str) -> int:
    """Return how little another metric says about the result of a training."""
    if SCORE.search(name):
        return 0
    if LOWER_IS_BETTER.search(name):
        return 1
    return 3 if INCIDENTAL.search(name) else 2


def measured_by(value: MetricValue) -> str:
    """Return who has measured a value if that was not the program."""
    return f"  ({MEASURED_LOSS})" if value.measured else ""


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


_FORMS = ("json", "pairs")
_LINES = 2
"""Lines that must have values before a pattern is proposed: one may be a coincidence."""


def pattern_hint(lines: Iterable[LogLine]) -> str:
    """Return how the metrics of a program can be seen, by the first pattern that fits its lines."""
    # Imported here: most programs log their metrics.
    from ltui.training.rank.program.printed_values import metric_pattern

    texts = [line.text for line in lines]
    for form in _FORMS:
        find = metric_pattern(form)
        found = [values for text in texts if (values := _goals(find(text)))]
        if len(found) >= _LINES:
            name, value = next(iter(found[-1].items()))
            example = f"{clean_name(name, 30)} {value:g}"
            return f"It prints {example}: ltui exec --metrics-pattern {form} -- ... shows it."
    return "ltui_rank.log(loss=loss) in the program shows its values."


def _goals(values: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in values.items() if any(goal.search(n) for goal in GOALS)}
