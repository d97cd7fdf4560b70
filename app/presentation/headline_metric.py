"""The one metric that represents a run in a list of runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ltui.training.state.metric_name_patterns import (
    INCIDENTAL,
    LOWER_IS_BETTER,
    SCORE,
    TRAIN_LOSS_ALIASES,
    is_evaluation,
)
from ltui.training.state.run_snapshot import RunSnapshot


@dataclass(frozen=True, slots=True)
class HeadlineMetric:
    """A metric and its last value."""

    name: str
    """The name as logged; ``loss`` for every usual name of the training loss."""
    value: float

    @property
    def lower_is_better(self) -> bool:
        return bool(LOWER_IS_BETTER.search(self.name))


def headline_metric(run: RunSnapshot) -> HeadlineMetric | None:
    """Return the training loss, else another loss, else a score, else any logged metric."""
    if not run.metrics:
        return None
    name = min(run.metrics, key=lambda name: (_priority(name), name))
    short = "loss" if name.lower() in TRAIN_LOSS_ALIASES else name
    return HeadlineMetric(short, run.metrics[name].last)


def _priority(name: str) -> int:
    lower = name.lower()
    if lower in TRAIN_LOSS_ALIASES:
        return 0
    if "loss" in lower:
        return 2 if is_evaluation(name) else 1
    if SCORE.search(name):
        return 3
    if LOWER_IS_BETTER.search(name):
        return 4
    return 6 if INCIDENTAL.search(name) else 5
