"""Probes of real sockets and real processes on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from ltui.training.nodes.node_watch import ProbeResult, ProbeSocket, probe, probe_all
from tests.nodes.addresses import LOOPBACKS
from tests.nodes.link_fixtures import freeze

_AGENT = """
import sys, time
from ltui.training.nodes.node_watch import ProbeSocket
kept = ProbeSocket(sys.argv[1])
print(kept.port, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_frozen_process_accepts_and_a_dead_one_refuses(address: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _AGENT, address], stdout=subprocess.PIPE, text=True
    ) as agent:
        try:
            assert agent.stdout is not None
            port = int(agent.stdout.readline())
            assert probe(address, port, 10.0) is ProbeResult.ACCEPTED
            freeze(agent.pid)
            assert probe(address, port, 10.0) is ProbeResult.ACCEPTED
        finally:
            agent.kill()
    assert probe(address, port, 10.0) is ProbeResult.REFUSED


def test_many_probes_never_fill_the_queue_of_a_frozen_process() -> None:
    kept = ProbeSocket("127.0.0.1")
    try:
        results = [probe("127.0.0.1", kept.port, 10.0) for _ in range(400)]
        assert set(results) == {ProbeResult.ACCEPTED}
    finally:
        kept.close()


def test_a_machine_that_does_not_answer_is_unreachable() -> None:
    # A listener whose queue is full answers no further connection, as a machine that is down.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address: tuple[str, int] = listener.getsockname()
        with socket.create_connection(address, 10.0):
            waiting = [socket.socket() for _ in range(8)]
            try:
                for connection in waiting:
                    connection.setblocking(False)
                    connection.connect_ex(address)
                assert probe(*address, 0.3) is ProbeResult.UNREACHABLE
            finally:
                for connection in waiting:
                    connection.close()


def test_all_targets_are_probed_at_the_same_time() -> None:
    kept = [ProbeSocket("127.0.0.1") for _ in range(20)]
    try:
        targets = {n: ("127.0.0.1", probed.port) for n, probed in enumerate(kept)}
        kept[7].close()
        results = probe_all({**targets, "no address": ("host.invalid", 1)}, 10.0)
        assert results.pop("no address") is ProbeResult.UNREACHABLE
        assert [n for n, r in results.items() if r is not ProbeResult.ACCEPTED] == [7]
        assert results[7] is ProbeResult.REFUSED
    finally:
        for probed in kept:
            probed.close()


def test_only_the_given_address_is_bound() -> None:
    kept = ProbeSocket("127.0.0.1")
    try:
        assert probe("127.0.0.2", kept.port, 10.0) is ProbeResult.REFUSED
    finally:
        kept.close()
