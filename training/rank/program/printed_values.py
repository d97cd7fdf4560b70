"""Record the values in the lines that the program prints, by the pattern that the user gives.

Nothing is guessed: without ``--metrics-pattern`` no line is read. The dashboard reads lines by the
same patterns, so this module needs no torch.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_LINE = 1000
"""Characters of a line that is read; a longer one is no line of metrics, and costs time."""

_PARTS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validate": "val", "validating": "val", "validation": "val",
    "eval": "eval", "evaluate": "eval", "evaluating": "eval", "evaluation": "eval",
    "test": "test", "testing": "test", "dev": "dev",
}  # fmt: skip
"""Words for a part of the data, and the prefix of its metrics."""
_HEADING_WORD = re.compile(
    "begin|errors?|metrics|model|on|performance|phase|report|results?|run|running|scores|set|split"
    "|starting|stats|step|summary|the"
)
"""Words that a line may have beside the part of the data that it announces."""
_LINKS = frozenset(("is", "on", "set", "the"))
"""Words between a name and its value."""
_QUALIFIERS = frozenset(("average", "avg", "best", "learning", "mean", "running"))
"""Words that make another name of the name behind them, such as ``avg_loss``."""
_NO_NAME = re.compile("after|and|at|by|far|for|from|in|of|or|over|per|so|than|to|took|until|with")
_COUNTER = re.compile(
    r"epochs?|(global_?)?steps?|iter(ation)?s?|batch(es)?|(data_?)?time|eta|lr|learning_rate"
    r"|mem(ory)?",
    re.IGNORECASE,
)
"""Names that are the same for every part of the data."""
_PROGRESS = re.compile(r"\W*\d|.*\[\s*\d+\s*/\s*\d+")
"""The beginning of a line that counts something, which a heading does not hold for."""
_TOKEN = re.compile(
    rf"""
      (?P<device>\b(?:cuda|cpu|mps|xpu):\d+)
    | (?P<wrapper>\b(?:torch\.)?tensor\( | \b(?:np|numpy)\.\w+\( | \barray\()
    | [(\[<{{]\s*(?P<part>{"|".join(_PARTS)})\s*[)\]>}}]
    | (?P<number>\d+\s*/\s*\d+(?![\w.:/]) | [-+]?(?:\.?\d[\w.:/%+-]*|(?:nan|inf)\b))
    | (?P<word>[^\W\d](?:[\w./@-]|'(?=\w))*)
    | (?P<link>[\s=:'"]+)
    | (?P<other>.)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|\.\d+(e[-+]?\d+)?|nan|inf)%?", re.IGNORECASE)

Values = dict[str, float]
FindValues = Callable[[str], Values]


def metric_pattern(text: str) -> FindValues:
    """Return the function that finds the values of a line, of which ``step`` may be one.

    ``text`` is ``json`` for lines that are JSON objects, ``pairs`` (see ``PairReader``), or a
    regular expression with a named group for each value. The function is called with each line of
    a program in turn. Raises ``ValueError``.
    """
    if text == "json":
        return _values_of_json
    if text == "pairs":
        return PairReader()
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


@dataclass(slots=True)
class _Pair:
    name: str
    before: str
    """The word before the name, by which two values of one name are told apart."""
    value: float
    part: str | None


@dataclass(slots=True)
class _Line:
    pairs: list[_Pair] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    """The parts of the data that it names."""
    has_words: bool = False
    is_heading: bool = True
    """True if it has no other words than those of a heading."""


class PairReader:
    """Finds the values of ``name value``, ``name=value`` and ``name: value`` in each line.

    A word for a part of the data is the prefix of the names up to the next such word:
    ``val loss 3.0 acc 0.5`` is ``val/loss`` and ``val/acc``. It also holds for the lines below that
    are indented more and name no part; a line that is only a heading, such as ``Validating...``,
    holds for the lines below it too, unless it announces the training.
    It ends at a line that names a part, at one that counts something, at a line of other words, and
    at an empty line or a name that comes again.
    """

    def __init__(self) -> None:
        self._part: str | None = None
        """The part that holds for lines that name none."""
        self._is_heading = False
        self._indent = 0
        self._names: set[str] = set()
        """Names of values below the heading."""

    def __call__(self, text: str) -> Values:
        """Return the values of a line."""
        line = _parse(text)
        indent = len(text) - len(text.lstrip())
        counts = any(_COUNTER.fullmatch(pair.name) for pair in line.pairs)
        if line.parts:
            self._part = line.parts[0] if len(set(line.parts)) == 1 else None
            measures = not all(_COUNTER.fullmatch(pair.name) for pair in line.pairs)
            self._is_heading = line.is_heading and not measures
            self._indent = indent
            self._names = set()
        elif self._part is not None and (line.pairs or line.has_words):
            counts = counts or _PROGRESS.match(text) is not None
            if self._holds(line, counts=counts, indented=indent > self._indent):
                self._names |= {pair.name for pair in line.pairs}
                for pair in line.pairs:
                    pair.part = self._part
            else:
                self._part = None
        elif self._names and not text.strip():
            self._part = None
        return _named(line.pairs)

    def _holds(self, line: _Line, *, counts: bool, indented: bool) -> bool:
        """Return True if the part of an earlier line is that of ``line``, which names none."""
        if indented:
            return self._is_heading or not counts
        if not self._is_heading or self._part == "train" or counts:
            return False
        if not line.pairs:
            return line.is_heading
        return self._names.isdisjoint(pair.name for pair in line.pairs)


def _parse(text: str) -> _Line:
    line = _Line()
    name = before = last = qualifier = ""
    part: str | None = None
    is_behind_part = False
    for token in _TOKEN.finditer(text):
        kind, word = token.lastgroup, token[token.lastgroup or 0]
        if kind == "word":
            word = word.rstrip("./-@")
            line.has_words = True
        lower = word.lower()
        if kind in ("link", "wrapper") or lower in _LINKS:
            continue
        if kind == "part" or lower in _PARTS:
            part, is_behind_part = _PARTS[lower], True
            line.parts.append(part)
            continue
        if kind == "word":
            line.is_heading &= (
                _HEADING_WORD.fullmatch(lower) or _COUNTER.fullmatch(lower)
            ) is not None
            before, name = name, "" if _NO_NAME.fullmatch(lower) else word
            if name and qualifier:
                before, name = "", f"{qualifier}_{lower}"
            qualifier = lower if lower in _QUALIFIERS else ""
        else:
            # LOSS train 0.5 valid 0.7: the second value has the name of the first.
            name = name or (last if is_behind_part else "")
            value = _value(word, name) if kind == "number" and name else None
            if value is not None and not (is_behind_part and _COUNTER.fullmatch(name)):
                line.pairs.append(_Pair(name, before, value, part))
                last = name
            name = before = qualifier = ""
        is_behind_part = False
    return line


def _value(text: str, name: str) -> float | None:
    """Return the value of a number; of a fraction such as 9000/10000 the ratio, or the count."""
    first, *others = (each.strip() for each in text.rstrip(".:").split("/"))
    if not all(_NUMBER.fullmatch(each) for each in (first, *others)) or len(others) > 1:
        return None
    value = float(first.rstrip("%"))
    if not others or _COUNTER.fullmatch(name):
        return value
    total = float(others[0].rstrip("%"))
    return value / total if total else None


def _named(pairs: list[_Pair]) -> Values:
    for pair in pairs:
        has_own = not _PARTS.keys().isdisjoint(re.split(r"[/_.-]", pair.name.lower()))
        if pair.part is not None and not has_own and not _COUNTER.fullmatch(pair.name):
            pair.name = f"{pair.part}/{pair.name.lower()}"
    names = [pair.name for pair in pairs]
    values: Values = {}
    for pair in pairs:
        name = pair.name
        own = f"{pair.before} {name}" if names.count(name) > 1 and pair.before else name
        number, numbered = 1, own
        while numbered in values:
            number += 1
            numbered = f"{own} {number}"
        values[numbered] = pair.value
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


_SLOW_S = 0.05
"""CPU seconds that a pattern may take for a line. Python cannot interrupt a regular expression."""
_MOST_SLOW, _SLOW_WITHIN = 3, 1000
"""Number of slow lines among so many after which a pattern is not used any more."""

_MAX_BEGUN = 8 * MAX_LINE
"""Characters of a line that are kept until it is complete, with the colours."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""The sequences by which a terminal gets colours."""
_REWRITES = re.compile(r"[\r\b]+")
"""What a progress bar prints before it writes its line again."""

Record = Callable[[Values, Any], None]


class PrintedValues:
    """What ``sys.stdout`` becomes: it writes as before, and records the values of whole lines.

    ``print`` and most libraries write there; a program of another language, or a stream that was
    kept from before, is not seen.
    """

    def __init__(self, stream: Any, find: FindValues, record: Record) -> None:
        self._stream, self._find, self._record = stream, find, record
        self._begun = ""
        """The line that is not complete yet."""
        self.failure: str | None = None
        """Why no line is read any more, as the middle of a sentence."""
        self.lines_found = self.lines_read = self.lines_skipped = 0
        self._slow_lines: list[int] = []
        self._has_reported_skipped = False

    def write(self, text: str) -> int:
        """Write ``text``, and read the lines that it completes."""
        written: int = self._stream.write(text)
        if self.failure is None:
            try:
                self._read(text)
            except Exception as error:  # noqa: BLE001  (ltui must not make a user's script fail)
                self.failure = f"{type(error).__name__}: {error}"
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # a copy of this object has no attributes at first
            raise AttributeError(name)
        return getattr(self._stream, name)

    def _read(self, text: str) -> None:
        *lines, begun = (self._begun + text).split("\n")
        if _REWRITES.search(begun):
            begun = _newest_state(begun) + ("\r" if begun.endswith(("\r", "\b")) else "")
        self._begun = begun[:_MAX_BEGUN]
        for line in lines:
            self._read_line(_newest_state(line))

    def _read_line(self, line: str) -> None:
        if len(line) > MAX_LINE:
            self.lines_skipped += 1
            return
        self.lines_read += bool(line)
        began = time.thread_time()
        values = self._find(line)
        if time.thread_time() - began > _SLOW_S:
            # One such line may be a garbage collection.
            self._slow_lines = [n for n in self._slow_lines if n > self.lines_read - _SLOW_WITHIN]
            self._slow_lines.append(self.lines_read)
            if len(self._slow_lines) == _MOST_SLOW:
                self.failure = f"it took more than {_SLOW_S * 1000:.0f} ms for each of some lines"
        step_name = next((name for name in values if name.lower() == "step"), "")
        step = values.pop(step_name, None)
        if values:
            self.lines_found += 1
            self._record(values, step)

    def complaint(self) -> str | None:
        """Return why nothing, or nothing more, was found; None if all is well."""
        if self.failure is not None:
            return f"The metrics pattern is not used any more: {self.failure}."
        if not self.lines_found:
            return "The metrics pattern found no value in what the program printed."
        return None

    def skipped_note(self) -> str | None:
        """Return once that lines were too long to be read; None before and after."""
        if not self.lines_skipped or self._has_reported_skipped:
            return None
        self._has_reported_skipped = True
        return f"The metrics pattern skips printed lines of more than {MAX_LINE:,} characters."


def _newest_state(line: str) -> str:
    """Return what a line that is written several times shows at last, without colours."""
    states = _REWRITES.split(_ESCAPES.sub("", line))
    return next((state for state in reversed(states) if state.strip()), "")


printed: PrintedValues | None = None
"""What this process prints; None without a pattern."""


def record_printed_values(find: FindValues, record: Record) -> None:
    """Read what this process prints from now on."""
    global printed
    sys.stdout = printed = PrintedValues(sys.stdout, find, record)
