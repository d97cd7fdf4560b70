"""Names of metrics, and the patterns by which a logged name is recognised. Pure.

Metrics have the names that a script logs, so what they mean is a guess from common habits. All such
guesses are in this module; the user interfaces and the store decide what to do with them.
"""

from __future__ import annotations

import re

TRAIN_LOSS = "train/loss"
"""The loss that ``training_step`` returned. A metric logged by this name replaces it."""

THROUGHPUT = "throughput/samples_per_s"
"""The throughput that the supervisor measures: see ``snapshot_from_fold.py``."""
TOTAL_RANK = -1
"""The rank under which the throughput of all ranks together is stored."""
METRIC_RANKS = 8
"""Metrics are folded for ranks below this number; the store keeps those of every rank."""
MAX_RANK_RATES = 8
"""Maximum number of ranks whose own throughput is stored, because a chart with hundreds of lines
cannot be read. The total is always stored."""

TRAIN_LOSS_NAMES = (TRAIN_LOSS, "train_loss", "loss")
"""Usual names of the training loss, the preferred one first."""

TRAIN_LOSS_ALIASES = frozenset({*TRAIN_LOSS_NAMES, "train/loss_epoch", "train_loss_epoch"})
"""All names, in lower case, that a run list shows as ``loss``."""

_EVALUATION_WORDS = "val|valid|validation|test|eval"
_EVALUATION = re.compile(
    rf"(^|[/_.\- ])({_EVALUATION_WORDS}|validate|testing)\d*($|[/_.\- ])", re.IGNORECASE
)

DATA_SPLIT = re.compile(
    rf"(^|[/_.\- ])(train|training|{_EVALUATION_WORDS})(?=$|[/_.\- ])", re.IGNORECASE
)
"""The part of a name that says on which part of the data it was measured."""

GOALS = (
    re.compile(r"(^|[/_.\- ])(reward|return)", re.IGNORECASE),
    re.compile(r"loss", re.IGNORECASE),
    re.compile(r"(acc|accuracy|f1|auc|auroc|iou|dice|bleu|rouge|psnr|ssim)", re.IGNORECASE),
    re.compile(r"(perplexity|ppl|error|mse|mae|rmse|elbo|entropy)", re.IGNORECASE),
)
"""Quantities that a script tries to improve, the most informative first. Only a script that learns
from a reward logs one, and its loss is then of little use."""

SCORE = re.compile(
    r"(^|[/_ ])(reward|return|score|success|acc|accuracy|f1|auc|auroc|map|iou|dice|bleu|rouge|psnr|"
    r"ssim|precision|recall)",
    re.I,
)
"""A metric that is better when it is higher."""

LOWER_IS_BETTER = re.compile(
    r"loss|error|perplexity|ppl|(^|[/_])(mse|mae|rmse|nll|bce|wer|cer|fid)", re.I
)

INCIDENTAL = re.compile(
    r"^(lr|epoch|step)|learning.?rate|grad.?norm|entropy|(^|[/_])kl|time|per_s", re.I
)
"""A metric that describes the training and not its result."""

LEARNING_RATE = re.compile(r"(^|[/_.-])(lr|learning_rate)($|[/_.-])", re.IGNORECASE)


def better_direction(name: str) -> str | None:
    """Return ``min`` or ``max`` if the name tells which values are better; else None."""
    if LEARNING_RATE.search(name):
        return None
    if LOWER_IS_BETTER.search(name):
        return "min"
    return "max" if SCORE.search(name) else None


def is_training_loss(name: str) -> bool:
    """Return True if the name is that of a loss, and not one of validation or test data."""
    return "loss" in name.lower() and not is_evaluation(name)


def is_evaluation(name: str) -> bool:
    """Return True if a part of the name means validation or test data: ``val/loss``, ``loss_test``.

    Every decision about such metrics uses this function, so that all user interfaces agree.
    """
    return _EVALUATION.search(name) is not None
