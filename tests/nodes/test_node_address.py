"""Addresses of nodes as users write them, and the own address that others reach."""

from __future__ import annotations

import socket

import pytest

from ltui.training.nodes.node_address import (
    format_host_and_port,
    is_reachable_by_others,
    local_address_towards,
    parse_host_and_port,
    reachable_address,
    resolve,
)
from ltui.training.problem import ProblemError
from tests.nodes.addresses import LOOPBACKS


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.5:29501", "10.0.0.5", 29501),
        (" node-1.cluster:1 ", "node-1.cluster", 1),
        ("[fd00::5]:65535", "fd00::5", 65535),
    ],
)
def test_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_host_and_port(text, "join") == (host, port)
    assert format_host_and_port(host, port) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "node", "node:", ":5", "node:0", "node:65536", "fd00::5:29501", "a:b:c", "[]:5"]
)
def test_what_is_not_host_and_port_is_one_sentence(text: str) -> None:
    with pytest.raises(ProblemError, match=r"join: .* is not HOST:PORT\. Write it as"):
        parse_host_and_port(text, "join")


def test_a_host_without_an_address() -> None:
    with pytest.raises(ProblemError, match=r"'host\.invalid' has no address"):
        resolve("host.invalid", "join")
    with pytest.raises(ProblemError, match="has no address"):
        resolve("x" * 300, "join")


@pytest.mark.parametrize("address", LOOPBACKS)
def test_numeric_addresses(address: str) -> None:
    assert resolve(address, "join") == [address]
    assert local_address_towards(address) == address
    assert not is_reachable_by_others(address)


def test_the_reachable_address_belongs_to_this_machine() -> None:
    address = reachable_address()
    if address is None:
        pytest.skip("this machine has only loopback addresses")
    assert is_reachable_by_others(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.bind((address, 0))


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "127.0.1.1", "fe80::1", "a name"])
def test_addresses_that_no_other_machine_reaches(address: str) -> None:
    assert not is_reachable_by_others(address)
