"""Follow the log files of an attempt: appended bytes only, a bounded start, a bounded memory."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

START_BYTES = 256 * 1024
READ_BYTES = 256 * 1024
"""Most bytes taken from one file at one look, so that a flood can't hold up the feed."""
LINE_BYTES = 16 * 1024
"""A line without an end is cut here."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line as written, decoded, not yet made safe for a terminal."""

    rank: int | None
    text: str


class FileTail:
    """The end of one file, then what is appended to it."""

    def __init__(self, path: Path, rank: int | None, *, start_bytes: int = START_BYTES) -> None:
        self.path, self.rank = path, rank
        self._start_bytes = start_bytes
        self._offset: int | None = None
        self._inode: int | None = None
        self._rest = b""
        self._skip_first = False

    def poll(self) -> list[RawLine]:
        """Complete lines since the last look. A missing file gives none; other errors are raised."""
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

    @property
    def unfinished(self) -> str:
        """The text after the last line end: a prompt, or a last line without an end."""
        return _decode(self._rest)

    def _place(self, status: os.stat_result) -> None:
        replaced = self._inode is not None and self._inode != status.st_ino
        shrunk = self._offset is not None and status.st_size < self._offset
        if self._offset is None:
            self._offset = max(0, status.st_size - self._start_bytes)
            self._skip_first = self._offset > 0
        elif replaced or shrunk:
            self._offset, self._rest, self._skip_first = 0, b"", False
        self._inode = status.st_ino

    def _lines(self, data: bytes) -> list[RawLine]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        if self._skip_first and whole:
            whole.pop(0)
            self._skip_first = False
        return [RawLine(self.rank, _decode(line[:LINE_BYTES])) for line in whole]


def _decode(line: bytes) -> str:
    return line.rstrip(b"\r").decode("utf-8", "replace")


class LogTail:
    """All log files of one attempt's folder, merged in the order in which they were seen to grow."""

    def __init__(self, folder: Path, *, max_lines: int = 5000) -> None:
        self.folder = folder
        self.version = 0
        """Changes when lines were added."""
        self._tails: dict[str, FileTail] = {}
        self._lines: deque[RawLine] = deque(maxlen=max_lines)

    def poll(self) -> bool:
        """Look once; True where something was added."""
        self._find_files()
        added = False
        for tail in self._tails.values():
            lines = tail.poll()
            self._lines.extend(lines)
            added = added or bool(lines)
        self.version += added
        return added

    def lines(self) -> tuple[RawLine, ...]:
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
