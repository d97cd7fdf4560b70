"""Record the values in the lines that the program prints, if the user gave a pattern."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from ltui.training.rank.program.metric_pattern import MAX_LINE, FindValues, Values

_SLOW_S = 0.05
"""CPU seconds that a pattern may take for a line. Python cannot interrupt a regular expression."""

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
        self.lines_found = self.lines_read = 0

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
        self._begun = begun[: MAX_LINE + 1]
        for line in lines:
            if 0 < len(line) <= MAX_LINE:
                self._read_line(line)

    def _read_line(self, line: str) -> None:
        self.lines_read += 1
        began = time.thread_time()
        values = self._find(line)
        if time.thread_time() - began > _SLOW_S:
            self.failure = f"it took more than {_SLOW_S * 1000:.0f} ms for a line"
        step = values.pop("step", None)
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


_printed: PrintedValues | None = None


def record_printed_values(find: FindValues, record: Record) -> None:
    """Read what this process prints from now on."""
    global _printed
    _printed = PrintedValues(sys.stdout, find, record)
    sys.stdout = _printed


def has_printed() -> bool:
    """Return True if this process has printed a line that was read."""
    return _printed is not None and _printed.lines_read > 0


def complaint() -> str | None:
    """Return why nothing, or nothing more, was found in what this process printed."""
    return None if _printed is None else _printed.complaint()
