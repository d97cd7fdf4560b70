"""Conditions at which a run stops by itself: a step, an epoch, a metric's value, a time. Pure.

Ranks check steps and epochs themselves (``training/rank/coordination/step_consensus.py``), so
that they stop exactly there. The supervisor checks metrics and times.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from ltui.training.json_codec import from_json
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.metric_name_patterns import TRAIN_LOSS, is_training_loss
from ltui.training.state.run_snapshot import MetricValue, RunSnapshot

_GROUPED = re.compile("\\d{1,3}([ ,_\N{THIN SPACE}\N{NO-BREAK SPACE}]\\d{3})+")


def strip_digit_grouping(text: str) -> str:
    """Return ``text`` without the separators between groups of three digits, if it is a number."""
    text = text.strip()
    return re.sub(r"\D", "", text) if _GROUPED.fullmatch(text) else text


_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_METRIC = re.compile(r"\s*(?P<name>[^<>=\s]+)\s*(?P<op><=|>=|<|>)\s*(?P<value>\S+)\s*")
_CLOCK = re.compile(r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?")
_WAIT = re.compile(r"\+\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|m|min|h|d)")
UNIT_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Seconds of each unit of time that a person may write."""


class StopCondition(Struct, frozen=True, kw_only=True):
    """One condition. Its ``kind`` is ``step``, ``epoch``, ``metric``, ``clock`` or ``wait``.

    A condition may refer to the present ("this epoch"). ``resolve_condition`` replaces such a
    reference when the supervisor accepts the condition. Field names are stored in ``orders.json``.
    """

    kind: str
    step: int | None = None
    epochs: int | None = None
    """``epoch``: number of completed epochs at which the run stops.

    None means the end of the current epoch, until the condition is resolved.
    """
    metric: str | None = None
    compare: str = "<"
    value: float = math.nan
    after_step: int | None = None
    """``metric``: step of the metric when the condition was resolved; only later values count."""
    at_s: float | None = None
    """``clock``: unix time. If the system clock is set, the stop moves with it."""
    wait_s: float | None = None
    """``wait``: seconds to wait after the condition is resolved."""
    until_s: float | None = None
    """``wait``, resolved: time on the monotonic clock, which is never set."""

    def describe(self) -> str:
        """Return words for the condition, such as ``at step 500``."""
        if self.kind == "step":
            return f"at step {self.step}"
        if self.kind == "epoch":
            return "at the end of " + (
                "this epoch" if self.epochs is None else f"epoch {self.epochs}"
            )
        if self.kind == "metric":
            return f"when {self.metric} {self.compare} {self.value:g}"
        if self.kind == "clock":
            return f"at {_clock_words(self.at_s or 0.0)}"
        return f"{_wait_words(self.wait_s or 0.0)} after the request"

    def subject(self) -> tuple[str, str]:
        """Return what the condition is about; a new condition replaces one on the same subject."""
        kind = "clock" if self.kind == "wait" else self.kind
        return kind, self.metric or ""

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values; see ``from_document``."""
        given = {k: v for k, v in to_builtins(self).items() if v is not None}
        return given if self.kind == "metric" else {k: given[k] for k in given if k != "value"}


def from_document(document: Mapping[str, Any]) -> StopCondition:
    """Return the condition that ``to_document`` wrote. Raise ``ValueError`` if it is not one."""
    try:
        condition = from_json(StopCondition, document)
    except ValueError as error:
        raise ValueError("this is not a stop condition.") from error
    compares = condition.compare in _COMPARE and math.isfinite(condition.value)
    required = {
        "step": condition.step,
        "epoch": True,
        "metric": condition.metric if compares else None,
        "clock": condition.at_s,
        "wait": condition.wait_s,
    }
    if required.get(condition.kind) is None:
        raise ValueError("this is not a stop condition.")
    return condition


# -- parsing a user's input ------------------------------------------------------------------------


COMPARISON = "Compare a metric with a number, such as 'val/loss<0.2'."
"""The remedy for an invalid condition on a metric."""


def parse_metric_condition(text: str) -> StopCondition:
    """Parse a condition such as ``val/loss<0.2``. Raise ``ProblemError`` if it is invalid."""
    match = _METRIC.fullmatch(text)
    value = math.nan
    if match is not None:
        try:
            value = float(match["value"])
        except ValueError:
            value = math.nan
    if match is None or not math.isfinite(value):
        raise _problem("--when", text, COMPARISON)
    return StopCondition(kind="metric", metric=match["name"], compare=match["op"], value=value)


def parse_time_condition(text: str, now_s: float) -> StopCondition:
    """Parse ``18:30`` (the next one, in local time) or ``+2h``.

    Raise ``ProblemError`` if the text is neither.
    """
    text = text.strip()
    if wait := _WAIT.fullmatch(text):
        wait_s = float(wait["number"]) * UNIT_S[wait["unit"]]
        return StopCondition(kind="wait", wait_s=wait_s)
    clock = _CLOCK.fullmatch(text)
    now = datetime.fromtimestamp(now_s)
    try:
        if clock is None:
            raise ValueError
        parts = [int(clock[name] or 0) for name in ("hour", "minute", "second")]
        at = now.replace(hour=parts[0], minute=parts[1], second=parts[2], microsecond=0)
    except ValueError:
        raise _problem("--at", text, "Give a time such as 18:30, or a delay such as +2h.") from None
    return StopCondition(
        kind="clock", at_s=(at if at > now else at + timedelta(days=1)).timestamp()
    )


def parse_condition(text: str, now_s: float) -> StopCondition:
    """Parse ``500``, ``epoch``, ``val/loss<0.2``, ``18:30`` or ``+2h``.

    Raise ``ProblemError`` if the text is none of them.
    """
    text = strip_digit_grouping(text)
    if text.isdecimal():
        return StopCondition(kind="step", step=int(text))
    if text.lower() in ("epoch", "epoch end", "end of epoch"):
        return StopCondition(kind="epoch")
    remedy = "Give a step, `epoch`, a condition on a metric, or a time, as shown above."
    try:
        if any(sign in text for sign in "<>"):
            remedy = COMPARISON
            return parse_metric_condition(text)
        return parse_time_condition(text, now_s)
    except ProblemError:
        raise _problem("stop when", text, remedy) from None


def _problem(where: str, text: str, remedy: str) -> ProblemError:
    return ProblemError(Problem(where=f"{where} {text}", what="invalid condition.", remedy=remedy))


def unlogged_metrics(conditions: Iterable[StopCondition], snapshot: RunSnapshot) -> str | None:
    """Return a sentence about metrics that the run has not logged, perhaps by a mistyped name;
    None if there are none, or if it has not logged any metric yet."""
    metrics = snapshot.metrics
    # The loss of each step is known also where the program logs it by another name.
    known = {*metrics, *([TRAIN_LOSS] if any(map(is_training_loss, metrics)) else [])}
    unknown = [c.metric for c in conditions if c.metric and c.metric not in known]
    if not unknown or not metrics:
        return None
    names = ", ".join(f"`{name}`" for name in unknown)
    verb = "has" if len(unknown) == 1 else "have"
    return f"{names} {verb} not been logged yet. Logged metrics: {', '.join(sorted(metrics))}"


# -- in the supervisor -----------------------------------------------------------------------------


def refusal_reason(condition: StopCondition, snapshot: RunSnapshot) -> str | None:
    """Return a sentence that says why the run cannot stop there; None if it can."""
    if condition.kind == "epoch" and snapshot.program is not None:
        return "the epochs of this program are not known to ltui; --at-step stops it at a step."
    if condition.kind != "step" or condition.step is None:
        return None
    now, end = snapshot.global_step or 0, snapshot.max_steps
    if condition.step <= now:
        return f"step {condition.step} has passed; the run is at step {now}."
    if end is not None and condition.step >= end:
        return f"the run already ends at step {end}."
    return None


def resolve_condition(
    condition: StopCondition, metrics: Mapping[str, MetricValue], epoch: int | None, steady_s: float
) -> StopCondition:
    """Return the condition with its references to the present replaced.

    ``epoch`` is the current epoch and ``steady_s`` the time on the monotonic clock.
    """
    if condition.kind == "epoch" and condition.epochs is None:
        return replace(condition, epochs=(epoch or 0) + 1)
    if condition.kind == "metric" and (current := metrics.get(condition.metric or "")):
        return replace(condition, after_step=current.step)
    if condition.kind == "wait":
        return replace(condition, until_s=steady_s + (condition.wait_s or 0.0))
    return condition


def add_condition(
    conditions: Sequence[StopCondition], condition: StopCondition
) -> tuple[StopCondition, ...]:
    """Return the conditions with a new one, which replaces a condition on the same subject."""
    return (*(c for c in conditions if c.subject() != condition.subject()), condition)


def time_reason(condition: StopCondition, now_s: float, steady_s: float) -> str | None:
    """Return why a resolved condition on a time is met; None if it is not met, or another kind."""
    due_s, current_s = None, now_s
    if condition.kind == "clock":
        due_s = condition.at_s
    elif condition.kind == "wait":
        due_s, current_s = condition.until_s, steady_s
    return condition.describe() if due_s is not None and current_s >= due_s else None


def is_met(condition: StopCondition, value: float) -> bool:
    """Return whether a value meets the comparison of a condition on a metric."""
    return bool(_COMPARE[condition.compare](value, condition.value))


def metric_reason(condition: StopCondition, values: Iterable[tuple[int, float]]) -> str | None:
    """Return why a resolved condition on a metric is met; None if it is not met.

    ``values`` are the metric's steps and values; the first one that meets the condition counts.
    """
    for step, value in values:
        is_new = condition.after_step is None or step > condition.after_step
        if is_new and is_met(condition, value):
            limit = f"{condition.compare} {condition.value:g}"
            return f"because {condition.metric} is {value:g} ({limit}) at step {step}"
    return None


def _clock_words(at_s: float) -> str:
    at = datetime.fromtimestamp(at_s)
    return at.strftime("%H:%M" if at.second == 0 else "%H:%M:%S")


def _wait_words(wait_s: float) -> str:
    for unit in ("d", "h", "min"):
        if wait_s >= UNIT_S[unit] and wait_s % UNIT_S[unit] == 0:
            return f"{wait_s / UNIT_S[unit]:g} {unit}"
    return f"{wait_s:g} s"
