"""The values in a line that a program prints, by the pattern that the user gives.

Nothing is guessed: without ``--metrics-pattern`` no line is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_LINE = 1000
"""Characters of a line that is read; a longer one is no line of metrics, and costs time."""
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
_PAIR = re.compile(
    rf"([A-Za-z_][\w./-]*)(?:['\"]?\s*[=:]\s*['\"]?|\s+)({_NUMBER})(?![\w.])", re.IGNORECASE
)
"""Names and numbers may be in quotes, as in a printed dictionary."""

_SPLITS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "eval": "eval", "evaluation": "eval", "test": "test", "dev": "dev",
}  # fmt: skip
"""Words for a part of the data, and the prefix of its metrics."""
_SPLIT = "|".join(_SPLITS)
_HEADING = re.compile(rf"\b({_SPLIT})\b(?: set)?\s*[:\]|>]", re.IGNORECASE)
"""A heading such as ``Val:`` or ``[eval]``, for the pairs up to the next one."""
_WORD_BEFORE = re.compile(r"([A-Za-z_][\w./-]*)\s+$")
_COUNTER = re.compile(r"epoch|steps?|iter(ation)?s?|batch|time", re.IGNORECASE)
"""Names that are the same for every part of the data."""

Values = dict[str, float]
FindValues = Callable[[str], Values]


def metric_pattern(text: str) -> FindValues:
    """Return the function that finds the values of a line, of which ``step`` may be one.

    ``text`` is ``json`` for lines that are JSON objects, ``pairs`` (see ``pairs_of``), or a regular
    expression with a named group for each value.
    Raises ``ValueError``.
    """
    if text == "json":
        return _values_of_json
    if text == "pairs":
        return pairs_of
    try:
        expression = re.compile(text)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    if not expression.groupindex:
        raise ValueError("it has no named group, such as loss=(?P<loss>[0-9.]+)")

    def find(line: str) -> Values:
        found = expression.search(line)
        groups = {} if found is None else found.groupdict()
        values = {name: _number(value) for name, value in groups.items() if value is not None}
        return {name: value for name, value in values.items() if value is not None}

    return find


def pairs_of(line: str) -> Values:
    """Return the values of ``name value``, ``name=value`` and ``name: value`` in a line.

    A name behind a word for a part of the data gets its prefix: ``val loss 3.0`` is ``val/loss``.
    Two values with one name are told apart by the words before them.
    """
    pairs: list[tuple[str, str, float]] = []
    headings = [(heading.start(), heading[1]) for heading in _HEADING.finditer(line)]
    end = 0
    for pair in _PAIR.finditer(line):
        word = _WORD_BEFORE.search(line, end, pair.start(1))
        before = "" if word is None else word[1]
        name = pair[1]
        heading = [word for at, word in headings if at < pair.start(1)]
        split = before if before.lower() in _SPLITS else "".join(heading[-1:])
        if split and not _COUNTER.fullmatch(name) and "/" not in name:
            name = f"{_SPLITS[split.lower()]}/{name.lower()}"
        pairs.append((name, before, float(pair[2])))
        end = pair.end()
    names = [name for name, _, _ in pairs]
    values: Values = {}
    for name, before, value in pairs:
        own = f"{before} {name}" if names.count(name) > 1 and before else name
        number, numbered = 1, own
        while numbered in values:
            number += 1
            numbered = f"{own} {number}"
        values[numbered] = value
    return values


def _values_of_json(line: str) -> Values:
    if not line.lstrip().startswith("{"):
        return {}
    try:
        document = json.loads(line)
    except ValueError:
        return {}
    return {
        str(name): float(value)
        for name, value in document.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
