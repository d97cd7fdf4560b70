"""The one metric that stands for a run in a list of runs. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ltui.training.state.run_snapshot import RunSnapshot

_TRAIN_LOSS = frozenset(
    {"loss", "train/loss", "train_loss", "train/loss_epoch", "train_loss_epoch"}
)
_SCORES = re.compile(
    r"(^|[/_ ])(reward|return|score|success|acc|accuracy|f1|auc|auroc|map|iou|bleu|psnr)", re.I
)
_LOWER = re.compile(r"loss|error|perplexity|ppl|(^|[/_])(mse|mae|rmse|nll|bce|wer|cer|fid)", re.I)
_INCIDENTAL = re.compile(
    r"^(lr|epoch|step)|learning.?rate|grad.?norm|entropy|(^|[/_])kl|time|per_s", re.I
)


@dataclass(frozen=True, slots=True)
class HeadlineMetric:
    """A metric and its last value."""

    name: str
    """``loss`` for the training loss, whichever of its usual names it was logged under."""
    value: float

    @property
    def lower_is_better(self) -> bool:
        return bool(_LOWER.search(self.name))


def headline_metric(run: RunSnapshot) -> HeadlineMetric | None:
    """The training loss; without one another loss, then a score, then what else was logged."""
    if not run.metrics:
        return None
    name = min(run.metrics, key=lambda name: (_rank(name), name))
    short = "loss" if name.lower() in _TRAIN_LOSS else name
    return HeadlineMetric(short, run.metrics[name].last)


def _rank(name: str) -> int:
    lower = name.lower()
    if lower in _TRAIN_LOSS:
        return 0
    if "loss" in lower:
        return 2 if lower.startswith(("val", "test")) else 1
    if _SCORES.search(name):
        return 3
    if _LOWER.search(name):
        return 4
    return 6 if _INCIDENTAL.search(name) else 5
