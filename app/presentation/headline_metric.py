"""The order in which a run's metrics are shown, and the one metric that represents it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from ltui.training.state.metric_name_patterns import (
    INCIDENTAL,
    LOWER_IS_BETTER,
    SCORE,
    TRAIN_LOSS_ALIASES,
    better_direction,
    is_evaluation,
    is_training_loss,
)
from ltui.training.state.run_snapshot import MetricValue, RunSnapshot

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
