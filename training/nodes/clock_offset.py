"""Offset between the clocks of another machine and those of this one. Pure.

A message that is received has been delayed by an unknown time, but never by less than zero. So of
the last messages the one with the smallest difference of clocks was delayed least, and gives the
best offset (the filter of NTP's clock algorithm, RFC 5905 section 10, for messages in one
direction).
"""

from __future__ import annotations

from collections import deque

_SAMPLES = 64
"""Number of messages of which the fastest one counts."""
_JUMP_S = 2.0
"""Change of the difference of the wall clocks from which on it is a jump and not a delay."""


class ClockOffset:
    """Offset that has to be added to times of another machine. Zero before the first message."""

    def __init__(self) -> None:
        self._differences_ns: deque[int] = deque(maxlen=_SAMPLES)
        self._wall_differences_s: deque[float] = deque(maxlen=_SAMPLES)
        self.monotonic_ns = 0
        """To add to its CLOCK_MONOTONIC, in nanoseconds."""
        self.wall_s = 0.0
        """To add to its unix time, in seconds."""
        self.jumped_s = 0.0
        """Seconds by which its wall clock was set forward (positive) or back at the last jump."""

    def update(self, sent_ns: int, sent_s: float, received_ns: int, received_s: float) -> None:
        """Note a message: its times on the clocks of the sender and of this machine."""
        difference_ns = received_ns - sent_ns
        # A machine that was rebooted has another monotonic clock.
        if self._differences_ns and difference_ns < min(self._differences_ns) - _JUMP_S * 1e9:
            self._differences_ns.clear()
        self._differences_ns.append(difference_ns)
        self.monotonic_ns = min(self._differences_ns)
        # The monotonic clocks show how long the message took; what is left is the wall clocks'.
        delay_s = (difference_ns - self.monotonic_ns) / 1e9
        difference_s = received_s - sent_s - delay_s
        if self._wall_differences_s and abs(difference_s - self.wall_s) > _JUMP_S:
            self.jumped_s = self.wall_s - difference_s
            self._wall_differences_s.clear()
        self._wall_differences_s.append(difference_s)
        self.wall_s = min(self._wall_differences_s)
