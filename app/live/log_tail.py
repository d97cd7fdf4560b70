"""Follow the log files of an attempt: appended bytes only, a bounded start, a bounded memory."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

from ltui.widgets.sanitise import clean_line
from ltui.widgets.view_models import LogLine, Tone

START_BYTES = 256 * 1024
READ_BYTES = 256 * 1024
"""Most bytes taken from one file at one look, so that a flood can't hold up the feed."""
LINE_BYTES = 16 * 1024
"""A line without an end is cut here."""


_ERROR = re.compile(
    r"\b(Traceback|[A-Z]\w*(Error|Exception|Interrupt)\b.*:|(ERROR|FATAL|CRITICAL)\b)"
)
_WARNING = re.compile(r"\b(WARN(ING)?\b|[A-Z]\w*Warning\b)")
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:\s?")
"""Put before the lines of a traceback by torch, and before all lines by torchrun."""


class FileTail:
    """The end of one file, then what is appended to it.

    ``is_new``: the file appeared while it was watched, so that its first lines have just arrived.
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
        self._knows_arrival = is_new
        self._in_traceback = False
        self._start_bytes = start_bytes
        self._offset: int | None = None
        self._inode: int | None = None
        self._rest = b""
        self._skip_first = False

    def poll(self, now: float | None = None) -> list[LogLine]:
        """Complete lines since the last poll. A missing file gives none; other errors rise.

        ``now`` in unix seconds becomes the arrival time of lines that were appended since.
        """
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
        lines = self._lines(data, now if self._knows_arrival else None)
        # A long file is read in parts: the part after this one may be as old.
        self._knows_arrival = self._knows_arrival or self._offset >= status.st_size
        return lines

    def finish(self) -> list[LogLine]:
        """The last line of a file that ends without a line end, once nothing more is written."""
        rest, self._rest = self._rest, b""
        return [self._line(rest, None)] if rest else []

    def _place(self, status: os.stat_result) -> None:
        replaced = self._inode is not None and self._inode != status.st_ino
        shrunk = self._offset is not None and status.st_size < self._offset
        if self._offset is None:
            self._offset = max(0, status.st_size - self._start_bytes)
            self._skip_first = self._offset > 0
        elif replaced or shrunk:
            self._offset, self._rest, self._skip_first = 0, b"", False
        self._inode = status.st_ino

    def _lines(self, data: bytes, seen_at: float | None) -> list[LogLine]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        if self._skip_first and whole:
            whole.pop(0)
            self._skip_first = False
        return [self._line(line[:LINE_BYTES], seen_at) for line in whole]

    def _line(self, line: bytes, seen_at: float | None) -> LogLine:
        """A line as written, made safe to show."""
        text = clean_line(line.decode("utf-8", "replace"))
        tone, in_traceback = self._level(_RANK_PREFIX.sub("", text))
        return LogLine(
            rank=self.rank, text=text, tone=tone, in_traceback=in_traceback, seen_at=seen_at
        )

    def _level(self, text: str) -> tuple[Tone, bool]:
        """The tone of a line, and whether it belongs to a traceback."""
        if text.lstrip(" |+").startswith("Traceback (most recent call last)"):
            self._in_traceback = True
            return Tone.BAD, True
        if self._in_traceback:
            # The first line that is not indented names the exception, however it is called.
            if text.strip() and not text.startswith((" ", "|")):
                self._in_traceback = False
                return Tone.BAD, True
            return Tone.PLAIN, True
        if _ERROR.search(text):
            return Tone.BAD, False
        return Tone.WARN if _WARNING.search(text) else Tone.PLAIN, False


class LogTail:
    """All log files of one attempt's folder, merged in the order in which they grew."""

    def __init__(self, folder: Path, *, max_lines: int = 5000) -> None:
        self.folder = folder
        self.count = 0
        """Lines ever added: tells a reader how many of the last ones are new to it."""
        self._began = False
        self._tails: dict[str, FileTail] = {}
        self._lines: deque[LogLine] = deque(maxlen=max_lines)

    def poll(self, now: float | None = None) -> bool:
        """Read once; True where something was added. ``now`` is the time of arrival."""
        self._find_files()
        before = self.count
        for tail in self._tails.values():
            self._add(tail.poll(now))
        return self.count > before

    def finish(self) -> None:
        """Read what is left without a line end: the run has ended."""
        for tail in self._tails.values():
            self._add(tail.finish())

    def _add(self, lines: list[LogLine]) -> None:
        self._lines.extend(lines)
        self.count += len(lines)

    def lines(self) -> tuple[LogLine, ...]:
        return tuple(self._lines)

    def _find_files(self) -> None:
        try:
            with os.scandir(self.folder) as entries:
                logs = {e.name: e for e in entries if e.name.endswith(".log")}
        except FileNotFoundError:
            self._began = True
            return
        new = [name for name in logs if name not in self._tails]
        if new:
            # The file that was written last stands last: that is where a run failed.
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
    """``rank-00003.log`` is rank 3's; any other log (``engine.log``) is nobody's."""
    stem = name.removesuffix(".log")
    digits = stem.removeprefix("rank-")
    return int(digits) if digits != stem and digits.isdigit() else None
