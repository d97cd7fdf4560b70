"""Follow the log files of an attempt: appended bytes only, a bounded start, a bounded memory."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

from ltui.widgets.sanitise import clean_line
from ltui.widgets.shapes import LogLine, Tone

START_BYTES = 256 * 1024
READ_BYTES = 256 * 1024
"""Most bytes taken from one file at one look, so that a flood can't hold up the feed."""
LINE_BYTES = 16 * 1024
"""A line without an end is cut here."""


_ERROR = re.compile(
    r"\b(Traceback|[A-Z]\w*(Error|Exception|Interrupt)\b.*:|(ERROR|FATAL|CRITICAL)\b)"
)
_WARNING = re.compile(r"\b(WARN(ING)?\b|[A-Z]\w*Warning\b)")


class FileTail:
    """The end of one file, then what is appended to it."""

    def __init__(self, path: Path, rank: int | None, *, start_bytes: int = START_BYTES) -> None:
        self.path, self.rank = path, rank
        self._start_bytes = start_bytes
        self._offset: int | None = None
        self._inode: int | None = None
        self._rest = b""
        self._skip_first = False

    def poll(self) -> list[LogLine]:
        """Complete lines since the last look. A missing file gives none; other errors rise."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._place(status)
                if status.st_size == self._offset:
                    return []
                file.seek(self._offset or 0)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset = (self._offset or 0) + len(data)
        return self._lines(data)

    def finish(self) -> list[LogLine]:
        """The last line of a file that ends without a line end, once nothing more is written."""
        rest, self._rest = self._rest, b""
        return [log_line(self.rank, rest)] if rest else []

    def _place(self, status: os.stat_result) -> None:
        replaced = self._inode is not None and self._inode != status.st_ino
        shrunk = self._offset is not None and status.st_size < self._offset
        if self._offset is None:
            self._offset = max(0, status.st_size - self._start_bytes)
            self._skip_first = self._offset > 0
        elif replaced or shrunk:
            self._offset, self._rest, self._skip_first = 0, b"", False
        self._inode = status.st_ino

    def _lines(self, data: bytes) -> list[LogLine]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        if self._skip_first and whole:
            whole.pop(0)
            self._skip_first = False
        return [log_line(self.rank, line[:LINE_BYTES]) for line in whole]


def log_line(rank: int | None, line: bytes) -> LogLine:
    """A line as written, made safe to show."""
    text = clean_line(line.decode("utf-8", "replace"))
    tone = Tone.PLAIN
    if _ERROR.search(text):
        tone = Tone.BAD
    elif _WARNING.search(text):
        tone = Tone.WARN
    return LogLine(rank=rank, text=text, tone=tone)


class LogTail:
    """All log files of one attempt's folder, merged in the order in which they grew."""

    def __init__(self, folder: Path, *, max_lines: int = 5000) -> None:
        self.folder = folder
        self.count = 0
        """Lines ever added: tells a reader how many of the last ones are new to it."""
        self._tails: dict[str, FileTail] = {}
        self._lines: deque[LogLine] = deque(maxlen=max_lines)

    def poll(self) -> bool:
        """Look once; True where something was added."""
        self._find_files()
        before = self.count
        for tail in self._tails.values():
            self._add(tail.poll())
        return self.count > before

    def finish(self) -> None:
        """Take what stands without a line end: the run is over."""
        for tail in self._tails.values():
            self._add(tail.finish())

    def _add(self, lines: list[LogLine]) -> None:
        self._lines.extend(lines)
        self.count += len(lines)

    def lines(self) -> tuple[LogLine, ...]:
        return tuple(self._lines)

    def _find_files(self) -> None:
        try:
            names = sorted(entry.name for entry in os.scandir(self.folder))
        except FileNotFoundError:
            return
        for name in names:
            if name.endswith(".log") and name not in self._tails:
                self._tails[name] = FileTail(self.folder / name, rank_of_log(name))


def rank_of_log(name: str) -> int | None:
    """``rank-00003.log`` is rank 3's; any other log (``engine.log``) is nobody's."""
    stem = name.removesuffix(".log")
    digits = stem.removeprefix("rank-")
    return int(digits) if digits != stem and digits.isdigit() else None
