"""Rate limit for the sentences about refused connections: a peer may try many times a second. Pure.

Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

REPEAT_S = 60.0
"""Seconds in which a refusal of one address for one reason is reported once."""
MAX_PER_MINUTE = 20
"""Maximum number of sentences in one minute, whatever their addresses."""
_MAX_ENTRIES = 256


@dataclass(slots=True)
class _Entry:
    reported_s: float
    unreported: int = 0


class RefusalLog:
    """Decides which refusals are reported, and counts those between."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._minute_began_s = float("-inf")
        self._in_this_minute = 0

    def add(self, address: str, reason: str, now_s: float) -> str | None:
        """Return the sentence to report now; None if it was reported a short time ago."""
        entry = self._entries.get((address, reason))
        if entry is not None and now_s - entry.reported_s < REPEAT_S:
            entry.unreported += 1
            return None
        if now_s - self._minute_began_s >= 60.0:
            self._minute_began_s, self._in_this_minute = now_s, 0
        self._in_this_minute += 1
        if self._in_this_minute > MAX_PER_MINUTE:
            return None
        before = entry.unreported if entry is not None else 0
        self._entries[address, reason] = _Entry(now_s)
        self._entries.move_to_end((address, reason))
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)
        times = f" ({before} more times since the last report)" if before else ""
        return f"A connection from {address} was refused{times}: {reason}."
