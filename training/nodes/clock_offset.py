"""Differences between the clocks of another node and those of this machine. No clock, no thread.

Each report of an agent has the node's times when it was sent. The least difference to the time of
its arrival belongs to the message with the least delay, so late messages do not disturb it. The
result is too large by that delay, which is a fraction of a millisecond in a local network.

The monotonic clocks give the offset. The unix clocks need no second filter: by how much a unix
clock is ahead of the monotonic clock of the same machine does not depend on a delay. So a jump of a
unix clock is seen in the next report.
"""

from __future__ import annotations

from collections import deque

_WINDOW_NS = 60 * 10**9
"""Nanoseconds over which the least difference counts. Quartz clocks drift by a few milliseconds in
this time."""
_JUMP_NS = 10**9
"""A least difference that stays larger by this many nanoseconds is a jump of a clock."""
_SETTLED_NS = 10 * 10**9
"""Nanoseconds for which it must stay larger. A connection with a longer delay recovers before."""
_MAX_INTERVAL_NS = 10**9
"""The most nanoseconds between two reports that count as time."""
_STEP_NS = 2 * 10**6
"""The published offset changes only by steps of more than this, because each change is written to
every mirror of the node."""
_WALL_STEP_S = 0.01


class ClockOffset:
    """What to add to the times of another node. Zero before the first message."""

    def __init__(self) -> None:
        self.monotonic_ns = 0
        """To add to its CLOCK_MONOTONIC, in nanoseconds."""
        self.wall_s = 0.0
        """To add to its unix time, in seconds."""
        self._samples: deque[tuple[int, int]] = deque()
        """(time, difference) in ns, with growing differences: the first is the least."""
        self._larger: deque[tuple[int, int]] = deque()
        """The same for the differences since ``_larger_since_ns``."""
        self._larger_since_ns: int | None = None
        """Since when all differences have been larger by more than ``_JUMP_NS``."""
        self._received_ns = self._time_ns = 0
        """When the last message was received, and the time in which messages came: it stands still
        while the connection is cut, after which late messages come first."""

    def update(self, sent_ns: int, sent_s: float, received_ns: int, received_s: float) -> None:
        """Use a message: its times on the clocks of the sender and of this machine."""
        is_first = not self._samples
        self._time_ns += min(_MAX_INTERVAL_NS, max(0, received_ns - self._received_ns))
        self._received_ns = received_ns
        self._add(received_ns - sent_ns)
        least_ns = self._samples[0][1]
        if is_first or abs(least_ns - self.monotonic_ns) > _STEP_NS:
            self.monotonic_ns = least_ns
        ahead_s = (received_s - received_ns / 1e9) - (sent_s - sent_ns / 1e9)
        wall_s = ahead_s + self.monotonic_ns / 1e9
        if is_first or abs(wall_s - self.wall_s) > _WALL_STEP_S:
            self.wall_s = wall_s

    def _add(self, difference: int) -> None:
        now_ns = self._time_ns
        _extend(self._samples, now_ns, difference)
        if difference - self._samples[0][1] <= _JUMP_NS:
            self._larger_since_ns = None
            self._larger.clear()
            return
        if self._larger_since_ns is None:
            self._larger_since_ns = now_ns
        _extend(self._larger, now_ns, difference)
        if now_ns - self._larger_since_ns >= _SETTLED_NS:
            # The node was suspended or started again: earlier differences do not count any more.
            self._samples, self._larger = self._larger, deque()
            self._larger_since_ns = None


def _extend(samples: deque[tuple[int, int]], now_ns: int, difference: int) -> None:
    """Add a sample to a window whose first sample is always the least."""
    while samples and samples[-1][1] >= difference:
        samples.pop()
    samples.append((now_ns, difference))
    while now_ns - samples[0][0] > _WINDOW_NS:
        samples.popleft()
