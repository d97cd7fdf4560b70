"""A bounded buffer of log lines; identical consecutive lines are stored once with a count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ltui.widgets.log_folding import first_of_fold, folded
from ltui.widgets.view_models import LogLine


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
