"""The space of a sweep: which values each key may take. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from msgspec import Struct

from ltui.training.config.yaml_document import parse_value
from ltui.training.problem import ProblemError

Parameters = dict[str, Any]
Number = int | float

_FORM = re.compile(r"\s*(choice|range|interval)\s*\((.*)\)\s*", re.DOTALL)
_BEGIN = re.compile(r"\s*(choice|range|interval)\s*\(")
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
"""A text that needs no quotes."""
_FORMS = "Use choice(a,b), range(1,10[,step]) or interval(1e-4,1e-1[,log])."
MOST_CELLS = 1_000_000
"""Maximum number of combinations of a grid."""


class Dimension(Struct, frozen=True, kw_only=True):
    """The values of one key."""

    key: str
    kind: str
    """``choice``, ``range`` (numbers at equal distances, both ends included) or ``interval``."""
    values: tuple[Any, ...] = ()
    """The values of a choice."""
    low: Number = 0
    high: Number = 0
    step: Number = 1
    """Distance between two values of a range."""
    log: bool = False
    """True if an interval is sampled by the logarithm."""

    def __post_init__(self) -> None:
        if self.kind != "choice" and not (self.low < self.high and self.step > 0):
            raise ValueError(f"{self.key} has no values from {self.low} to {self.high}")

    @property
    def listed(self) -> tuple[Any, ...] | None:
        """All values in their order; None for an interval, which has too many."""
        if self.kind == "choice":
            return self.values
        if self.kind == "interval":
            return None
        return tuple(rounded(self.low + n * self.step) for n in range(self.count or 0))

    @property
    def count(self) -> int | None:
        """The number of values; None for an interval."""
        if self.kind == "range":
            return math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return len(self.values) if self.kind == "choice" else None

    def contains(self, value: Any) -> bool:
        """Return whether a trial with this value lies in the space."""
        if self.kind == "choice":
            return value_text(value) in {value_text(one) for one in self.values}
        if not is_number(value) or not self.low <= value <= self.high + abs(self.step) * 1e-9:
            return False
        place = (value - self.low) / self.step
        return self.kind == "interval" or abs(place - round(place)) < 1e-6

    def __str__(self) -> str:
        if self.kind == "choice":
            return f"choice({', '.join(quoted(value) for value in self.values)})"
        last = {"range": f", {self.step}", "interval": ", log" if self.log else ""}[self.kind]
        return f"{self.kind}({self.low}, {self.high}{last})"


def is_dimension(text: str) -> bool:
    """Return whether the value of ``KEY=VALUE`` is meant as several values."""
    return _BEGIN.match(text.partition("=")[2]) is not None


def parse_dimension(text: str, where: str = "--set") -> Dimension:
    """Return the values that ``KEY=choice(a,b)`` names. Raise ``ProblemError``."""
    key, _, form = text.partition("=")
    key, match = key.strip(), _FORM.fullmatch(form)
    place = f"{where} {text}"
    if match is None or not key:
        raise ProblemError.of(where=place, what="it names no values.", remedy=_FORMS)
    kind, inner = match.groups()
    try:
        words = parse_value(f"[{inner}]")
        json.dumps(words, allow_nan=False)
    except (ValueError, TypeError) as error:
        what = f"the values cannot be read ({error})."
        raise ProblemError.of(where=place, what=what, remedy=_FORMS) from error
    if kind == "choice":
        if not words or len({value_text(word) for word in words}) < len(words):
            what = "it names a value twice." if words else "it names no values."
            raise ProblemError.of(where=place, what=what, remedy=_FORMS)
        return Dimension(key=key, kind=kind, values=tuple(words))
    return _numbers(key, kind, words, place)


def _numbers(key: str, kind: str, words: list[Any], place: str) -> Dimension:
    """Return a range or an interval. Raise ``ProblemError``."""
    log = kind == "interval" and words[2:] == ["log"]
    numbers = words[:2] if log else words
    fault = None
    if len(words) not in (2, 3) or not all(is_number(n) for n in numbers):
        fault = "it needs two numbers."
    elif kind == "interval" and len(words) == 3 and not log:
        fault = f"`{words[2]}` is not `log`."
    elif not numbers[0] < numbers[1]:
        fault = "the second number is not greater than the first one."
    elif log and numbers[0] <= 0:
        fault = "a logarithm needs numbers greater than 0."
    elif len(numbers) == 3 and not 0 < numbers[2] <= numbers[1] - numbers[0]:
        fault = "the step does not fit between the numbers."
    if fault is not None:
        raise ProblemError.of(where=place, what=fault, remedy=_FORMS)
    low, high, *step = numbers
    if kind == "interval":
        low, high = float(low), float(high)
    return Dimension(key=key, kind=kind, low=low, high=high, step=step[0] if step else 1, log=log)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def rounded(value: Any) -> Any:
    """Return a number without the last digits, by which equal values of two computations differ."""
    return float(f"{value:.12g}") if type(value) is float else value


def value_text(value: Any) -> str:
    """Return a value as YAML on one line, as ``--set`` and a command take it."""
    if isinstance(value, str):
        return value
    if is_number(value):
        return repr(rounded(value))
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def quoted(value: Any) -> str:
    """Return a value so that YAML reads the same value, also within a list."""
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and parse_value(value) == value):
        return json.dumps(value)
    return value_text(value)


def override(key: str, value: Any) -> str:
    """Return ``KEY=VALUE`` as ``--set`` takes it."""
    return f"{key}={quoted(value)}"


def cell_of(parameters: Mapping[str, Any]) -> str:
    """Return the hash of parameters, by which a cell is found again in another space."""
    texts = {key: value_text(value) for key, value in parameters.items()}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:10]


def grid_size(space: Sequence[Dimension]) -> int | None:
    """Return the number of combinations; None if an interval has no end of them."""
    counts = [dimension.count for dimension in space]
    return None if None in counts else math.prod(count or 0 for count in counts)


def check_grid(space: Sequence[Dimension]) -> None:
    """Raise ``ProblemError`` if a grid has too many combinations, or no end of them."""
    size = grid_size(space)
    if size is None or size > MOST_CELLS:
        endless = next((f"{one.key}={one}" for one in space if one.count is None), "")
        what = f"the grid has more than {MOST_CELLS:,} combinations."
        raise ProblemError.of(
            where=f"--set {endless}" if endless else "--set",
            what="a grid of it has no end of values." if endless else what,
            remedy="Use choice or a shorter range, or --sampler tpe.",
        )


def grid(space: Sequence[Dimension]) -> Iterator[Parameters]:
    """Yield every combination, the last key first. The space has no interval."""
    keys = [dimension.key for dimension in space]
    for values in itertools.product(*(dimension.listed or () for dimension in space)):
        yield dict(zip(keys, values, strict=True))


def contains(space: Sequence[Dimension], parameters: Mapping[str, Any]) -> bool:
    """Return whether the space has these keys and values."""
    keys = {dimension.key for dimension in space}
    return keys == set(parameters) and all(d.contains(parameters[d.key]) for d in space)


def widened(old: Dimension, new: Dimension) -> Dimension:
    """Return ``old`` with the values of ``new``. Raise ``ProblemError`` if they do not fit."""
    if old.kind != new.kind or (old.step, old.log) != (new.step, new.log):
        raise _unlike(old, new, "appended")
    if old.kind == "choice":
        known = {value_text(value) for value in old.values}
        added = tuple(value for value in new.values if value_text(value) not in known)
        return Dimension(key=old.key, kind="choice", values=old.values + added)
    low, high = min(old.low, new.low), max(old.high, new.high)
    wide = Dimension(key=old.key, kind=old.kind, low=low, high=high, step=old.step, log=old.log)
    if old.kind == "range" and not (wide.contains(old.low) and wide.contains(new.low)):
        raise _unlike(old, new, "appended")
    return wide


def narrowed(old: Dimension, new: Dimension) -> Dimension:
    """Return ``new``, which lies within ``old``. Raise ``ProblemError`` if it does not."""
    ends = new.listed if new.kind != "interval" else (new.low, new.high)
    if not all(old.contains(value) for value in ends or ()):
        raise _unlike(old, new, "narrowed")
    return new


def _unlike(old: Dimension, new: Dimension, verb: str) -> ProblemError:
    return ProblemError.of(
        where=f"--set {new.key}={new}",
        what=f"{old} cannot be {verb} by it.",
        remedy="Give the same kind of values, with the same step."
        if verb == "appended"
        else "Give values that lie within it.",
    )
