"""A bounded buffer of log lines, and its rows on the screen. Pure.

Identical consecutive lines are stored once with a count. Lines of frameworks are shown as one line:
start-up, and reports of what was not freed. Warnings, errors and what the program itself prints are
never folded. Lines are filtered by level, and long lines are wrapped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace
from rich.cells import cell_len, get_character_cell_size

from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine

MAX_FOLDED = 500
"""Maximum number of lines that one line stands for."""
_KINDS = {
    "lines of start-up": re.compile(
        r"(\[rank: \d+\] )?(Global seed set|Seed set to)"
        r"|(GPU|TPU|HPU|IPU) available: |💡 Tip: |Adding \d+ callbacks from entry point"
        r"|Initializing distributed: |distributed_backend=|All distributed processes registered"
        r"|(Restoring states|Restored all states) from the checkpoint"
        r"|Loading `\w+_dataloader` to estimate|LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES"
        r"|Using (\d+bit|bfloat16|\w+ Automatic Mixed) |You are using a CUDA device"
    ),
    "lines about objects that were not freed": re.compile(
        r"nanobind: | - (leaked (instance|type|function) |\.\.\. skipped remainder)"
        r"|See https://nanobind\.readthedocs\.io"
    ),
}
_BETWEEN = re.compile(r"\s*|-{20,}")
"""Lines that belong to the ones around them."""


def folded(last: LogLine | None, line: LogLine) -> LogLine | None:
    """Return the line that stands for ``last`` and ``line``; None if both are shown."""
    if last is None or not last.folded or line.tone is not Tone.PLAIN or line.in_traceback:
        return None
    kind = _kind(last.folded[0])
    if len(last.folded) >= MAX_FOLDED or kind is None:
        return None
    if _kind(line.text) != kind and not _BETWEEN.fullmatch(line.text):
        return None
    lines = (*last.folded, line.text)
    return replace(last, text=f"{len(lines)} {kind} (u: show)", tone=Tone.DIM, folded=lines)


def first_of_fold(line: LogLine) -> LogLine:
    """Return a line that further lines of its kind are folded into, or the line itself."""
    if line.tone is not Tone.PLAIN or line.in_traceback or _kind(line.text) is None:
        return line
    return replace(line, folded=(line.text,))


def unfolded(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Yield every line that was folded as it was written."""
    for line in lines:
        if not line.folded:
            yield line
        for text in line.folded:
            yield replace(line, text=text, tone=Tone.PLAIN, folded=())


def _kind(text: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.match(text)), None)


class LogBuffer:
    """The newest ``max_lines`` lines. Line ``i`` is number ``first + i`` of all lines added."""

    def __init__(self, max_lines: int) -> None:
        assert max_lines > 0
        self._max_lines = max_lines
        self._lines: list[LogLine] = []
        self.first = 0
        self.folds = True
        """Store consecutive lines of a framework as one line."""
        self._query = ""
        self._hits: list[int] = []
        """Numbers of the lines that contain the query, up to ``_searched_to``."""
        self._searched_to = 0

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> LogLine:
        return self._lines[index]

    def __iter__(self) -> Iterator[LogLine]:
        return iter(self._lines)

    def clear(self) -> None:
        self.first += len(self._lines)
        self._lines.clear()
        self._clear_hits()

    def extend(self, lines: Iterable[LogLine]) -> int:
        """Add lines, and return the number of old lines that were dropped."""
        stored = self._lines
        for line in lines:
            last = stored[-1] if stored else None
            if self.folds:
                if (one := folded(last, line)) is not None:
                    stored[-1] = one
                    self._clear_hits()
                    continue
                line = first_of_fold(line)
            if last is not None and last.text == line.text and last.rank == line.rank:
                count = last.count + line.count
                stored[-1] = replace(last, count=count, seen_at=line.seen_at)
            else:
                stored.append(line)
        dropped = max(0, len(stored) - self._max_lines)
        if dropped:
            del stored[:dropped]
            self.first += dropped
        return dropped

    def hits(self, query: str) -> list[int]:
        """Return the indices of lines that contain ``query``, ignoring case.

        Lines that were searched before are not searched again.
        """
        if not query:
            return []
        if query != self._query:
            self._clear_hits()
            self._query = query
        needle = query.lower()
        begin = max(self._searched_to, self.first)
        for index in range(begin - self.first, len(self._lines)):
            if needle in self._lines[index].text.lower():
                self._hits.append(index + self.first)
        self._searched_to = self.first + len(self._lines)
        self._hits = [h for h in self._hits if h >= self.first]
        return [h - self.first for h in self._hits]

    def _clear_hits(self) -> None:
        self._hits = []
        self._searched_to = self.first


def occurrences(text: str, query: str) -> list[int]:
    """Return the positions of ``query`` in ``text``, ignoring case, without overlaps."""
    lower_text, needle = text.lower(), query.lower()
    # Lower case may have another length (İ). Then no position is returned rather than a wrong one.
    if not needle or len(lower_text) != len(text) or len(needle) != len(query):
        return []
    positions, position = [], lower_text.find(needle)
    while position >= 0:
        positions.append(position)
        position = lower_text.find(needle, position + len(needle))
    return positions


MIN_WRAP_CELLS = 8
"""Minimum cells of a wrapped row."""


class LogLevel(Enum):
    """Filter of log lines by severity."""

    ALL = "all lines"
    WARNINGS = "warnings and errors only"
    ERRORS = "errors only"

    def next(self) -> LogLevel:
        levels = list(LogLevel)
        return levels[(levels.index(self) + 1) % len(levels)]

    def shows(self, line: LogLine) -> bool:
        if self is LogLevel.ALL or line.in_traceback or line.tone is Tone.BAD:
            return True
        return self is LogLevel.WARNINGS and line.tone is Tone.WARN


class LogRow(NamedTuple):
    """The part of a line that is shown in one row of the screen."""

    number: int
    """Number of the line among all lines ever added: ``LogBuffer.first + index``."""
    begin: int
    end: int
    """The row shows ``shown_text(line)[begin:end]``."""


def shown_text(line: LogLine) -> str:
    """Return the text of a line, with its count if it represents several identical lines."""
    return f"{line.text}  ×{line.count}" if line.count > 1 else line.text


class LogRows:
    """The rows of a ``LogBuffer`` for one width and level. Only new lines are wrapped."""

    def __init__(self, lines: LogBuffer) -> None:
        self._lines = lines
        self._rows: list[LogRow] = []
        self._next_number = lines.first
        self.width: int | None = None
        """Cells of a row; None if lines are not wrapped."""
        self.level = LogLevel.ALL

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> LogRow:
        return self._rows[index]

    def lay_out(self, width: int | None, level: LogLevel) -> None:
        """Wrap all lines again for another width or level."""
        self.width = None if width is None else max(MIN_WRAP_CELLS, width)
        self.level = level
        self._rows.clear()
        self._next_number = self._lines.first
        self.update()

    def update(self) -> int:
        """Process lines that were added or dropped; return the number of rows that were dropped."""
        lines = self._lines
        dropped = self.index_of(lines.first)
        del self._rows[:dropped]
        # The count of the last line may have changed since the previous update.
        start = max(lines.first, self._next_number - 1)
        del self._rows[self.index_of(start) :]
        for number in range(start, lines.first + len(lines)):
            line = lines[number - lines.first]
            if self.level.shows(line):
                parts = wrap_rows(shown_text(line), self.width)
                self._rows.extend(LogRow(number, begin, end) for begin, end in parts)
        self._next_number = lines.first + len(lines)
        return dropped

    def index_of(self, number: int) -> int:
        """Return the index of the first row of line ``number``, or of the next shown line."""
        return bisect_left(self._rows, (number,))


def wrap_rows(text: str, width: int | None) -> list[tuple[int, int]]:
    """Return begin and end of each row of ``text``.

    A row ends after a blank if there is one in its second half.
    """
    if width is None or (text.isascii() and len(text) <= width) or cell_len(text) <= width:
        return [(0, len(text))]
    parts = []
    begin = 0
    while begin < len(text):
        end = _row_end(text, begin, width)
        if end < len(text):
            blank = text.rfind(" ", begin + (end - begin) // 2, end)
            end = blank + 1 if blank >= 0 else end
        parts.append((begin, end))
        begin = end
    return parts


def _row_end(text: str, begin: int, width: int) -> int:
    if text.isascii():
        return min(len(text), begin + width)
    cells = 0
    for index in range(begin, len(text)):
        cells += get_character_cell_size(text[index])
        if cells > width:
            # A row holds at least one character, even if it is wider than the row.
            return max(index, begin + 1)
    return len(text)
