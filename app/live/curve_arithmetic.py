"""The curves that a screen requests, and arithmetic on them. Pure, NumPy only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ltui.training.state.metric_name_patterns import GOALS, TRAIN_LOSS, is_evaluation
from ltui.training.store.curve_reader import Curve, FloatArray
from ltui.training.store.history_reader import ROW_SERIES, STEP_LOSS, STEP_SERIES

STEP_SECONDS = "step/seconds"
"""The duration of each step, also in a program whose samples are unknown."""
STEP_CURVES = (STEP_SERIES.keys() | ROW_SERIES.keys()) - {STEP_LOSS}
"""Curves that every step has, by their names in the store."""


class CurveRequest(Struct, frozen=True, kw_only=True):
    """The curves that a screen shows, and their level of detail."""

    names: frozenset[str] | None = None
    """Names of the curves; None means ``default_choice``."""
    steps: tuple[int, int] | None = None
    """First and last step of the visible part; None if everything is visible."""


class LatestCurveRequest:
    """Holds the newest request of a screen for the poller thread."""

    def __init__(self) -> None:
        self._request = CurveRequest()
        self.on_change: Callable[[], object] = lambda: None
        """Called when a screen requests something else."""

    @property
    def request(self) -> CurveRequest:
        return self._request

    @request.setter
    def request(self, request: CurveRequest) -> None:
        if request != self._request:
            self._request = request
            self.on_change()


BoolArray = npt.NDArray[np.bool_]

COLUMNS = ("steps", "epochs", "times", "mean", "low", "high", "count")
"""Names of the arrays of ``Curve``."""


def empty_curve() -> Curve:
    """Return a curve without points."""
    return Curve(**{name: np.empty(0) for name in COLUMNS})


def concatenate(parts: Sequence[Curve]) -> Curve:
    """Return the curves one after the other as one curve."""
    return Curve(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in COLUMNS})


def select_points(curve: Curve, chosen: slice | list[int] | BoolArray) -> Curve:
    """Return the points of a slice, of indices or of a mask."""
    return Curve(**{n: getattr(curve, n)[chosen] for n in COLUMNS})


def splice(curve: Curve, detail: Curve) -> Curve:
    """Return ``curve`` with the points in the range of ``detail`` replaced, if ``detail`` has
    more of them."""
    if not len(detail):
        return curve
    inside = (curve.steps >= detail.steps[0]) & (curve.steps <= detail.steps[-1])
    if int(inside.sum()) >= len(detail):
        return curve
    before, after = curve.steps < detail.steps[0], curve.steps > detail.steps[-1]
    return concatenate([select_points(curve, before), detail, select_points(curve, after)])


def smooth(curve: Curve, weight: float) -> FloatArray:
    """Return the exponential moving average without the bias of its start, as Adam and TensorBoard
    compute it.

    ``weight``, from 0 to 1, is the fraction of the average that remains at each logged value. A
    point that merges several values counts as that many. NaN leaves a gap.
    """
    if weight <= 0:
        return curve.mean
    finite = np.isfinite(curve.mean)
    keep = np.where(finite, weight ** np.maximum(curve.count, 1.0), 1.0)
    average = np.where(finite, (1 - keep) * np.where(finite, curve.mean, 0.0), 0.0)
    norm = 1 - np.cumprod(keep)
    # average[i] is keep[i] * average[i - 1] + average[i]. Each pass composes twice as many of these
    # steps, so a few passes over the array replace a loop over its points.
    span = 1
    while span < len(average):
        average[span:] += keep[span:] * average[:-span]
        keep[span:] *= keep[:-span]
        span *= 2
    smoothed = np.full(len(curve), np.nan)
    smoothed[finite] = average[finite] / norm[finite]
    return smoothed


def epoch_positions(
    steps: FloatArray, reference: Curve, steps_per_epoch: float | None
) -> FloatArray:
    """Return the positions of ``steps`` on an axis of epochs. ``reference`` gives the first step
    of each epoch."""
    finite = np.isfinite(reference.epochs)
    if not finite.any():
        return np.full(len(steps), np.nan)
    epochs, first = np.unique(reference.epochs[finite], return_index=True)
    begins = reference.steps[finite][first] - 1
    if len(begins) > 1:
        per_epoch = float(np.median(np.diff(begins) / np.diff(epochs)))
    else:
        per_epoch = steps_per_epoch or max(1.0, float(reference.steps[-1] - begins[0]))
    per_epoch = max(per_epoch, 1.0)
    knots_x = np.append(begins, begins[-1] + per_epoch)
    knots_y = np.append(epochs, epochs[-1] + 1)
    return np.asarray(np.interp(steps, knots_x, knots_y), dtype=np.float64)


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
