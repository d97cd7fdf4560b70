"""Record the values in the lines that the program prints, if the user gave a pattern."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ltui.training.rank.program.metric_pattern import MAX_LINE, FindValues, Values

if TYPE_CHECKING:
    from ltui.training.rank.channel import Channel

_SLOW_S = 0.05
"""CPU seconds that a pattern may take for a line. Python cannot interrupt a regular expression."""

_MAX_BEGUN = 8 * MAX_LINE
"""Characters of a line that are kept until it is complete, with the colours."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""The sequences by which a terminal gets colours."""
_REWRITES = re.compile(r"[\r\b]+")
"""What a progress bar prints before it writes its line again."""

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
        self.lines_found = self.lines_read = self.lines_skipped = 0

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
        if _REWRITES.search(begun):
            begun = _newest_state(begun) + ("\r" if begun.endswith(("\r", "\b")) else "")
        self._begun = begun[:_MAX_BEGUN]
        for line in lines:
            self._read_line(_newest_state(line))

    def _read_line(self, line: str) -> None:
        if len(line) > MAX_LINE:
            self.lines_skipped += 1
            return
        self.lines_read += bool(line)
        began = time.thread_time()
        values = self._find(line)
        if time.thread_time() - began > _SLOW_S:
            self.failure = f"it took more than {_SLOW_S * 1000:.0f} ms for a line"
        step_name = next((name for name in values if name.lower() == "step"), "")
        step = values.pop(step_name, None)
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


def _newest_state(line: str) -> str:
    """Return what a line that is written several times shows at last, without colours."""
    states = _REWRITES.split(_ESCAPES.sub("", line))
    return next((state for state in reversed(states) if state.strip()), "")


_printed: PrintedValues | None = None
_has_reported_skipped = False


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


def report_skipped(channel: Channel) -> None:
    """Send once that lines were too long to be read."""
    global _has_reported_skipped
    if _printed is not None and _printed.lines_skipped and not _has_reported_skipped:
        _has_reported_skipped = True
        text = f"The metrics pattern skips printed lines of more than {MAX_LINE:,} characters."
        channel.event_from_rank_0("note", text)
