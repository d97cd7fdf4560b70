"""Probe of a silent node: tells a frozen or dead agent from a machine that cannot be reached.

The kernel answers a TCP connection even if the process that listens is frozen, and refuses it once
the process is dead. No byte is exchanged. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import time
from collections.abc import Hashable, Mapping
from enum import Enum
from typing import TypeVar

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

    def drain(self) -> None:
        """Close the connections that wait, such as those of a port scan. Never blocks."""
        with contextlib.suppress(OSError):
            for _ in range(_BACKLOG):
                self._socket.accept()[0].close()

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
