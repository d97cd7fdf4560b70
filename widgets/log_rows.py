"""Rows of a log on the screen: which lines are shown, and how long lines wrap. Pure."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import NamedTuple

from rich.cells import cell_len, get_character_cell_size

from ltui.widgets.log_lines import LogBuffer
from ltui.widgets.view_models import LogLine, Tone

MIN_WRAP_CELLS = 8
"""Lines are never wrapped narrower than this."""


class LogLevel(Enum):
    """Which lines of a log are shown."""

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
    """A part of a line that fits into one row of the screen."""

    number: int
    """The line's number among all that were ever added: ``LogBuffer.first + index``."""
    begin: int
    end: int
    """The part of ``shown_text(line)``."""


def shown_text(line: LogLine) -> str:
    """The text of a line, with the number of identical lines that it stands for."""
    return f"{line.text}  ×{line.count}" if line.count > 1 else line.text


class LogRows:
    """The rows of ``lines`` for one width and level. Only new lines are laid out."""

    def __init__(self, lines: LogBuffer) -> None:
        self._lines = lines
        self._rows: list[LogRow] = []
        self._next = lines.first
        self.width: int | None = None
        """Cells of a row; None: lines are not wrapped."""
        self.level = LogLevel.ALL

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> LogRow:
        return self._rows[index]

    def lay_out(self, width: int | None, level: LogLevel) -> None:
        """Lay out every line again."""
        self.width = None if width is None else max(MIN_WRAP_CELLS, width)
        self.level = level
        self._rows.clear()
        self._next = self._lines.first
        self.update()

    def update(self) -> int:
        """Follow the lines that were added and dropped; return how many rows were dropped."""
        lines = self._lines
        dropped = self.index_of(lines.first)
        del self._rows[:dropped]
        # The newest known line may have got a greater count since.
        again = max(lines.first, self._next - 1)
        del self._rows[self.index_of(again) :]
        for number in range(again, lines.first + len(lines)):
            line = lines[number - lines.first]
            if self.level.shows(line):
                parts = wrapped(shown_text(line), self.width)
                self._rows.extend(LogRow(number, begin, end) for begin, end in parts)
        self._next = lines.first + len(lines)
        return dropped

    def index_of(self, number: int) -> int:
        """The first row of line ``number``, or of the next line that is shown."""
        return bisect_left(self._rows, (number,))


def wrapped(text: str, width: int | None) -> list[tuple[int, int]]:
    """Where the rows of ``text`` begin and end: after a blank if one is near, else anywhere."""
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
            # At least one character, however wide it is.
            return max(index, begin + 1)
    return len(text)
