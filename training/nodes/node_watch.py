"""State and clock of one other machine, from its reports and from probes.

Silence alone does not say why a machine is silent. A probe of its agent's port tells a cut link, a
dead agent and a frozen one apart: the kernel answers a TCP connection even if the process that
listens is frozen, and refuses it once the process is dead. No byte is exchanged. Times are
monotonic seconds.

Each report of an agent has the node's times when it was sent. The least difference to the time of
its arrival belongs to the message with the least delay, so late messages do not disturb it. The
result is too large by that delay, which is a fraction of a millisecond in a local network.

The monotonic clocks give the offset. The unix clocks need no second filter: by how much a unix
clock is ahead of the monotonic clock of the same machine does not depend on a delay. So a jump of a
unix clock is seen in the next report.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Hashable, Mapping
from enum import Enum
from typing import TypeVar

from msgspec import Struct

from ltui.training.nodes.messages import NODE_GONE_S
from ltui.training.state.run_snapshot import NodeState

Target = TypeVar("Target", bound=Hashable)

_BACKLOG = 128


class ProbeResult(str, Enum):
    """Answer of a machine to a probe."""

    ACCEPTED = "accepted"
    """The process exists. If it is silent, it is frozen or its thread is stuck."""
    REFUSED = "refused"
    """The machine answers, and the process is dead. Some firewalls refuse in the same way."""
    UNREACHABLE = "unreachable"
    """No answer: the link is cut, the machine is down, or a firewall drops the packets."""


class ProbeSocket:
    """Listening socket that shows that its process exists, until ``close``.

    Firewalls may hide it. Therefore the head should trust REFUSED and UNREACHABLE only of a node
    whose probe was ACCEPTED once.
    """

    def __init__(self, address: str) -> None:
        """Bind a free port of ``address``, a numeric address of this machine."""
        family, sockaddr = _numeric(address, 0)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Nobody accepts the connections, and the queue of accepted ones is short. With this
            # option a connection enters it only once data arrives, and a probe sends none.
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 60)
            self._socket.setblocking(False)
            self._socket.bind(sockaddr)
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def probe(address: str, port: int, timeout_s: float) -> ProbeResult:
    """Connect to ``port`` of the numeric ``address``, and close the connection at once."""
    return probe_all({0: (address, port)}, timeout_s)[0]


def probe_all(
    targets: Mapping[Target, tuple[str, int]], timeout_s: float
) -> dict[Target, ProbeResult]:
    """Probe all targets at the same time. Returns after ``timeout_s`` at the latest."""
    results = dict.fromkeys(targets, ProbeResult.UNREACHABLE)
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        for target, (address, port) in targets.items():
            try:
                family, sockaddr = _numeric(address, port)
                connection = connections.enter_context(socket.socket(family, socket.SOCK_STREAM))
                # A reset instead of a normal close, so that the target keeps no connection.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.setblocking(False)
                code = connection.connect_ex(sockaddr)
            except OSError:  # too many open files, or an unusable address
                continue
            if code == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, target)
            else:
                results[target] = _result(code)
        while selector.get_map() and (remaining_s := deadline - time.monotonic()) > 0:
            for ready, _ in selector.select(remaining_s):
                connection = ready.fileobj  # type: ignore[assignment]
                results[ready.data] = _result(
                    connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                )
                selector.unregister(connection)
    return results


def _result(code: int) -> ProbeResult:
    if code == 0:
        return ProbeResult.ACCEPTED
    refusals = (errno.ECONNREFUSED, errno.ECONNRESET)
    return ProbeResult.REFUSED if code in refusals else ProbeResult.UNREACHABLE


def _numeric(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the family and the socket address of a numeric address. Raise ``OSError``."""
    entries = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
    )
    family, _, _, _, sockaddr = entries[0]
    return family, sockaddr  # type: ignore[return-value]


SILENT_AFTER_S = 3.0
"""Seconds without a report after which a machine is silent, and is probed."""
RECONNECT_S = 15.0
"""Seconds after a cut in which an agent that does not report may still be about to reconnect."""
_STATES = {
    ProbeResult.ACCEPTED: NodeState.FROZEN,
    ProbeResult.REFUSED: NodeState.AGENT_DEAD,
    ProbeResult.UNREACHABLE: NodeState.UNREACHABLE,
}
_TEXTS = {
    NodeState.SILENT: "no report for {s:.0f} s",
    NodeState.UNREACHABLE: "no answer from {place} for {s:.0f} s: its link is cut or it is down",
    NodeState.FROZEN: "its agent does not answer for {s:.0f} s, though its machine does",
    NodeState.AGENT_DEAD: "its agent has ended {s:.0f} s ago, its machine answers",
    NodeState.GONE: "no answer from {place} for {s:.0f} s",
}


class LinkCut(Struct, frozen=True):
    """A time in which a machine could not be reached. Monotonic seconds."""

    began_s: float
    ended_s: float


class NodeWatch:
    """Watches one machine. The link's thread calls ``heard``, the loop everything else."""

    def __init__(self, gone_after_s: float = NODE_GONE_S) -> None:
        """``gone_after_s``: seconds of silence after which an unreachable machine is gone."""
        self.state = NodeState.JOINING
        self.last_cut: LinkCut | None = None
        self._gone_after_s = gone_after_s
        self._heard_s: float | None = None
        self._address: str | None = None
        self._port: int | None = None
        self._probed: ProbeResult | None = None
        """Result of the last probe since the last report."""
        self._unreachable_s: float | None = None
        """Time of the last probe since the last report that had no answer."""
        self._answers_probes = False
        """True if a probe was accepted once, so that no firewall hides the port."""

    def heard(self, now_s: float, address: str | None, port: int | None) -> None:
        """Note a report. ``address`` and ``port`` are those of the agent's probe socket."""
        if self._heard_s is not None and self._unreachable_s is not None:
            self.last_cut = LinkCut(self._heard_s, now_s)
        self._unreachable_s = None
        self._heard_s, self._address, self._port = now_s, address, port
        self._probed = None

    def silent_s(self, now_s: float) -> float | None:
        """Return the seconds since the last report; None before the first."""
        return None if self._heard_s is None else max(0.0, now_s - self._heard_s)

    def target(self, now_s: float) -> tuple[str, int] | None:
        """Return the address to probe, or None if no probe is due.

        A machine that reports is probed once, to see whether probes reach it.
        """
        if self._address is None or self._port is None or self._heard_s is None:
            return None
        if self.state is NodeState.ENDED:
            return None
        due = now_s - self._heard_s > SILENT_AFTER_S - 1.0 or not self._answers_probes
        return (self._address, self._port) if due else None

    def probed(self, result: ProbeResult, now_s: float) -> None:
        """Note the result of a probe that began at ``now_s``."""
        if self._heard_s is not None and self._heard_s > now_s:
            return  # The machine has reported since, so the result is out of date.
        if result is ProbeResult.UNREACHABLE:
            self._unreachable_s = now_s
        self._answers_probes = self._answers_probes or result is ProbeResult.ACCEPTED
        self._probed = result

    def update(self, now_s: float, *, ended: bool) -> str | None:
        """Derive the state. Return a phrase if it has changed to or from one that is a problem."""
        before, self.state = self.state, self._derive(now_s, ended=ended)
        if before is self.state or {before, self.state} <= {
            NodeState.JOINING,
            NodeState.CONNECTED,
            NodeState.SILENT,
            NodeState.ENDED,
        }:
            return "joined" if before is NodeState.JOINING and self._heard_s is not None else None
        return "reports again" if self.state is NodeState.CONNECTED else self.note(now_s)

    def _derive(self, now_s: float, *, ended: bool) -> NodeState:
        silent_s = self.silent_s(now_s)
        if silent_s is None:
            return NodeState.JOINING
        if ended:
            return NodeState.ENDED
        if silent_s <= SILENT_AFTER_S:
            return NodeState.CONNECTED
        probed = self._probed
        if probed is None or (probed is not ProbeResult.ACCEPTED and not self._answers_probes):
            # Without a probe that once succeeded, a firewall may be the reason for its result.
            state = NodeState.SILENT if silent_s < 3 * SILENT_AFTER_S else NodeState.UNREACHABLE
        else:
            state = _STATES[probed]
            if self._unreachable_s is not None and now_s - self._unreachable_s < RECONNECT_S:
                state = NodeState.UNREACHABLE
        if state is not NodeState.FROZEN and silent_s > self._gone_after_s:
            return NodeState.GONE
        return state

    def note(self, now_s: float) -> str | None:
        """Return the reason for the state in a few words; None if there is nothing to explain."""
        state = self.state
        refused = self._answers_probes and self._probed is ProbeResult.REFUSED
        if state is NodeState.GONE and refused:
            state = NodeState.AGENT_DEAD  # the machine answers, and no agent listens there
        text = _TEXTS.get(state)
        if text is None:
            return None
        return text.format(s=self.silent_s(now_s) or 0.0, place=self._address or "it")


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
