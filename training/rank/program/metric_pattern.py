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
_PAIR = re.compile(rf"([A-Za-z_][\w./-]*)(?:\s*[=:]\s*|\s+)({_NUMBER})(?![\w.])", re.IGNORECASE)

Values = dict[str, float]
FindValues = Callable[[str], Values]


def metric_pattern(text: str) -> FindValues:
    """Return the function that finds the values of a line, of which ``step`` may be one.

    ``text`` is ``json`` for lines that are JSON objects, ``pairs`` for ``name value``,
    ``name=value`` and ``name: value``, or a regular expression with a named group for each value.
    Raises ``ValueError``.
    """
    if text == "json":
        return _values_of_json
    if text == "pairs":
        return lambda line: {name: float(value) for name, value in _PAIR.findall(line)}
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
