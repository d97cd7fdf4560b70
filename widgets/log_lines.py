"""A bounded list of log lines: identical neighbours become one with a count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ltui.widgets.view_models import LogLine


class LogBuffer:
    """Holds at most ``most`` lines. Line ``i`` is the ``first + i``-th that was ever added."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most
        self._lines: list[LogLine] = []
        self.first = 0
        self._query = ""
        self._hits: list[int] = []
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
        self._forget()

    def extend(self, lines: Iterable[LogLine]) -> int:
        """Add lines; returns how many old ones were dropped for them."""
        held = self._lines
        for line in lines:
            last = held[-1] if held else None
            if last is not None and last.text == line.text and last.rank == line.rank:
                count = last.count + line.count
                held[-1] = replace(last, count=count, seen_at=line.seen_at)
            else:
                held.append(line)
        dropped = max(0, len(held) - self._most)
        if dropped:
            del held[:dropped]
            self.first += dropped
        return dropped

    def hits(self, query: str) -> list[int]:
        """Indices of the lines that hold ``query``, whatever the case; only new lines are read."""
        if not query:
            return []
        if query != self._query:
            self._forget()
            self._query = query
        wanted = query.lower()
        begin = max(self._searched_to, self.first)
        for index in range(begin - self.first, len(self._lines)):
            if wanted in self._lines[index].text.lower():
                self._hits.append(index + self.first)
        self._searched_to = self.first + len(self._lines)
        self._hits = [h for h in self._hits if h >= self.first]
        return [h - self.first for h in self._hits]

    def _forget(self) -> None:
        self._hits = []
        self._searched_to = self.first


def occurrences(text: str, query: str) -> list[int]:
    """Where ``query`` begins in ``text``, whatever the case; without overlaps."""
    folded, wanted = text.lower(), query.lower()
    # Lowering may change a length (İ); then no place is marked rather than a wrong one.
    if not wanted or len(folded) != len(text) or len(wanted) != len(query):
        return []
    found, at = [], folded.find(wanted)
    while at >= 0:
        found.append(at)
        at = folded.find(wanted, at + len(wanted))
    return found
