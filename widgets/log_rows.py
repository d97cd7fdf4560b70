"""The screen rows of a log: lines are filtered by level, and long lines are wrapped. Pure."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import NamedTuple

from rich.cells import cell_len, get_character_cell_size

from ltui.widgets.log_buffer import LogBuffer
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine

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
