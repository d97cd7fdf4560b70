"""Loopback addresses that this machine has, as parameters of tests."""

from __future__ import annotations

import contextlib
import random
import socket

import pytest


def has_ipv6() -> bool:
    """Return whether a socket can be bound to ``::1``."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as bound:
            bound.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")

LOOPBACKS = [
    pytest.param("127.0.0.1", id="IPv4"),
    pytest.param("::1", id="IPv6", marks=needs_ipv6),
]


def free_port_pair() -> str:
    """Return the first of two free neighbouring ports, drawn so that tests side by side differ."""
    while True:
        first = random.randrange(20_000, 28_000, 2)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", first))
            other.bind(("127.0.0.1", first + 1))
            return str(first)
