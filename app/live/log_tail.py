"""Follow the log files of an attempt. Only appended bytes are read; the start and the memory are
bounded."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from ltui.training.shared.regular_files import open_regular
from ltui.widgets.sanitise import clean_line
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine

START_BYTES = 256 * 1024
"""Maximum number of bytes read from the end of a file when it is opened."""
READ_BYTES = 256 * 1024
"""Maximum number of bytes read from one file in one poll, so that a flood of output cannot delay
the poller."""
LINE_BYTES = 16 * 1024
"""Maximum length of a line; a longer one is split here."""


_ERROR = re.compile(
    r"\b(Traceback|[A-Z]\w*(Error|Exception|Interrupt)\b.*:|(ERROR|FATAL|CRITICAL)\b)"
)
_WARNING = re.compile(r"\b(WARN(ING)?\b|[A-Z]\w*Warning\b)")
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:\s?")
"""Prefix that torch adds to the lines of a traceback, and torchrun to all lines."""


class FileTail:
    """The end of one file, then what is appended to it.

    ``is_new``: the file appeared while it was being watched, so its first lines have just arrived.
    """

    def __init__(
        self,
        path: Path,
        rank: int | None,
        *,
        start_bytes: int = START_BYTES,
        is_new: bool = False,
    ) -> None:
        self.path, self.rank = path, rank
        self._node = node_of_launcher_log(path.name)
        self._knows_arrival = is_new
        self._in_traceback = False
        self._failed = False
        self._start_bytes = start_bytes
        self._offset: int | None = None
        self._inode: int | None = None
        self._rest = b""
        self._skip_first = False

    def poll(self, now: float | None = None, end: int | None = None) -> list[LogLine]:
        """Return the complete lines since the last poll.

        A missing file gives none, and one that cannot be read a line that says so. ``now``, in
        unix seconds, becomes the arrival time of lines that were appended since the last poll.
        ``end``: the bytes that the file had at this time, if it is read as it was then.
        """
        if end is not None and self._offset is not None and end <= self._offset:
            return []
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                size = status.st_size if end is None else min(end, status.st_size)
                self._check_replaced(status.st_ino, size)
                if size == self._offset:
                    return []
                file.seek(self._offset or 0)
                data = file.read(min(READ_BYTES, max(0, size - (self._offset or 0))))
        except FileNotFoundError:
            return []
        except OSError as error:
            known, self._failed = self._failed, True
            text = f"ERROR: {self.path.name} cannot be read: {error.strerror}"
            return [] if known else [self._log_line(text.encode(), now)]
        self._failed = False
        self._offset = (self._offset or 0) + len(data)
        lines = self._split_lines(data, now if self._knows_arrival else None)
        # A long file is read in parts, and the next part may be as old as this one.
        self._knows_arrival = self._knows_arrival or self._offset >= size
        return lines

    def finish(self) -> list[LogLine]:
        """Return the last line of a file without a final line end. To be called when nothing
        more is written."""
        last_line, self._rest = self._rest, b""
        return [self._log_line(last_line, None)] if last_line else []

    def _check_replaced(self, inode: int, size: int) -> None:
        replaced = self._inode is not None and self._inode != inode
        shrunk = self._offset is not None and size < self._offset
        if self._offset is None:
            self._offset = max(0, size - self._start_bytes)
            self._skip_first = self._offset > 0
        elif replaced or shrunk:
            self._offset, self._rest, self._skip_first = 0, b"", False
        self._inode = inode

    def _split_lines(self, data: bytes, seen_at: float | None) -> list[LogLine]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        if self._skip_first and lines:
            lines.pop(0)
            self._skip_first = False
        return [self._log_line(line[:LINE_BYTES], seen_at) for line in lines]

    def _log_line(self, line: bytes, seen_at: float | None) -> LogLine:
        """Return a line as it was written, made safe to display."""
        text = clean_line(line.decode("utf-8", "replace"))
        tone, in_traceback = self._classify(_RANK_PREFIX.sub("", text))
        return LogLine(
            rank=self.rank,
            text=text,
            tone=tone,
            in_traceback=in_traceback,
            seen_at=seen_at,
            node=self._node,
        )

    def _classify(self, text: str) -> tuple[Tone, bool]:
        """Return the tone of a line, and whether it belongs to a traceback."""
        if text.lstrip(" |+").startswith("Traceback (most recent call last)"):
            self._in_traceback = True
            return Tone.BAD, True
        if self._in_traceback:
            # The first line that is not indented names the exception, of any class.
            if text.strip() and not text.startswith((" ", "|")):
                self._in_traceback = False
                return Tone.BAD, True
            return Tone.PLAIN, True
        if _ERROR.search(text):
            return Tone.BAD, False
        return Tone.WARN if _WARNING.search(text) else Tone.PLAIN, False


class LogTail:
    """All log files in the folder of one attempt, merged in the order in which they grew."""

    def __init__(self, folder: Path, *, max_lines: int = 5000) -> None:
        self.folder = folder
        self.count = 0
        """Number of lines added so far: a reader computes from it how many of the last lines are
        new."""
        self._began = False
        self._tails: dict[str, FileTail] = {}
        self._lines: deque[LogLine] = deque(maxlen=max_lines)

    def poll(self, now: float | None = None, sizes: Mapping[str, int] | None = None) -> bool:
        """Read every file once, and return whether lines were added. ``now`` is the time of
        arrival. ``sizes``: the bytes of each file at that time, by name, if it is past."""
        self._find_files(sizes)
        before = self.count
        for name, tail in self._tails.items():
            if sizes is None or name in sizes:
                self._add(tail.poll(now, None if sizes is None else sizes[name]))
        return self.count > before

    def finish(self) -> None:
        """Read the remaining text without a line end, after the run has ended."""
        for tail in self._tails.values():
            self._add(tail.finish())

    def _add(self, lines: list[LogLine]) -> None:
        self._lines.extend(lines)
        self.count += len(lines)

    def lines(self) -> tuple[LogLine, ...]:
        return tuple(self._lines)

    def _find_files(self, sizes: Mapping[str, int] | None) -> None:
        try:
            with os.scandir(self.folder) as entries:
                logs = {e.name: e for e in entries if e.name.endswith(".log")}
                if sizes is not None:
                    logs = {name: entry for name, entry in logs.items() if name in sizes}
        except FileNotFoundError:
            self._began = True
            return
        new = [name for name in logs if name not in self._tails]
        if new:
            # The file that was written last comes last, because it shows where a run failed.
            for name in sorted(new, key=lambda n: (_changed_at(logs[n]), n)):
                self._tails[name] = FileTail(
                    self.folder / name, rank_of_log(name), is_new=self._began
                )
        self._began = True


def _changed_at(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def rank_of_log(name: str) -> int | None:
    """Return the rank of a log file: 3 for ``rank-00003.log``, None for any other log such as
    ``engine.log``."""
    stem = name.removesuffix(".log")
    digits = stem.removeprefix("rank-")
    return int(digits) if digits != stem and digits.isdigit() else None


def node_of_launcher_log(name: str) -> int:
    """Return the machine of a launcher's log: 1 for ``engine-1.log``, 0 for any other log."""
    stem = name.removesuffix(".log")
    digits = stem.removeprefix("engine-")
    return int(digits) if digits != stem and digits.isdecimal() else 0
