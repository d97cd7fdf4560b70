"""The link between head and agents, by real sockets on loopback and real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ltui.training.nodes.head_link import MAX_STRANGERS, HeadLink
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.link_wire import (
    MAX_MESSAGE_BYTES,
    MAX_PER_MINUTE,
    REPEAT_S,
    Header,
    MalformedMessageError,
    MessageKind,
    RefusalLog,
    curve_key,
    decode_header,
)
from ltui.training.nodes.node_watch import ProbeResult, probe
from ltui.training.problem import ProblemError
from tests.nodes.addresses import LOOPBACKS
from tests.nodes.link_fixtures import (
    LOOPBACK,
    agent,
    exchange,
    freeze,
    head,
    options,
    raw_peer,
    refusal,
    refused,
)
from tests.waiting import wait_for

KEY = LinkKey.generate()
OTHER_KEY = LinkKey.generate()

# -- exchange --------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", LOOPBACKS)
def test_every_report_is_answered(address: str) -> None:
    with head(KEY, address) as recording, agent(KEY, recording.link.port, host=address) as link:
        for payload in (b"one", os.urandom(100_000), b"x" * 1_000_000, b"", b"end"):
            assert exchange(link, payload) == payload
        assert link.connected
        assert link.why_not_connected() is None
        assert link.local_address == address
        peer = recording.link.peers()["1"]
        assert peer.address == address
    assert not recording.refused


def test_many_agents_get_their_own_orders() -> None:
    with head(KEY) as recording:
        recording.orders = lambda identity, _: f"orders of {identity}".encode()
        names = [f"node-{n}" for n in range(20)]
        with contextlib.ExitStack() as stack:
            links = [stack.enter_context(agent(KEY, recording.link.port, n)) for n in names]
            for name, link in zip(names, links, strict=True):
                assert exchange(link, b"r") == f"orders of {name}".encode()
        assert set(recording.link.peers()) == {*names}


def test_a_wake_is_noticed_once() -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as link:
        recording.link.wake("1")  # not connected yet: nothing happens
        exchange(link, b"report")
        assert not link.woken()
        recording.link.wake("1")
        recording.link.wake("another node")
        assert link.woken(60.0)
        assert not link.woken()


def test_a_late_answer_is_returned_by_the_next_exchange() -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as link:
        exchange(link, b"first")
        recording.open.clear()
        assert link.exchange(b"second", 0.1) is None
        recording.open.set()
        # The head answers both in turn; the newest answer is the one returned.
        assert exchange(link, b"third") == b"third"
        assert link.exchange(b"fourth", 60.0) == b"fourth"


def test_reports_do_not_pile_up_while_the_head_does_not_answer() -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as link:
        exchange(link, b"first")
        recording.open.clear()
        began = time.monotonic()
        for _ in range(30):
            assert link.exchange(b"more", 0.01) is None
        allowed = 2 + (time.monotonic() - began) / 2
        recording.open.set()
        exchange(link, b"last")
        assert len(recording.reports) <= 2 + allowed + 1


def test_an_agent_without_a_head_does_not_wait() -> None:
    with head(KEY) as recording:
        port = recording.link.port
    with agent(KEY, port) as link:
        assert link.exchange(b"report", 0.0) is None
        assert not link.woken()
        assert not link.connected
        assert link.why_not_connected() == (
            f"Nothing listens at 127.0.0.1:{port}: the head has ended or not started."
        )


def test_a_message_over_the_limit_is_a_programming_error() -> None:
    with agent(KEY, 9) as link, pytest.raises(ValueError, match="too large"):
        link.exchange(bytes(MAX_MESSAGE_BYTES + 1), 0.0)


def test_an_error_in_the_head_does_not_end_its_thread(capfd: pytest.CaptureFixture[str]) -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as link:
        recording.orders = lambda *_: _raise()
        assert link.exchange(b"report", 0.5) is None
        recording.orders = lambda _, payload: payload
        assert exchange(link, b"next") == b"next"
    assert "a fault of the test" in capfd.readouterr().err


def _raise() -> bytes:
    raise RuntimeError("a fault of the test")


# -- address ---------------------------------------------------------------------------------------


def test_only_the_given_address_is_bound() -> None:
    with head(KEY) as recording:
        assert probe(LOOPBACK, recording.link.port, 10.0) is ProbeResult.ACCEPTED
        assert probe("127.0.0.2", recording.link.port, 10.0) is ProbeResult.REFUSED


def test_a_place_that_cannot_be_bound_is_one_sentence() -> None:
    with head(KEY) as recording:
        port = recording.link.port
        for address, number, sentence in (
            (LOOPBACK, port, f"127.0.0.1:{port}: port {port} is in use"),
            ("192.0.2.1", 0, r"192\.0\.2\.1 is not an address of this machine"),
        ):
            with pytest.raises(ProblemError, match=sentence):
                HeadLink(KEY, address, number, lambda *_: None, print)


# -- admission -------------------------------------------------------------------------------------


def test_a_wrong_key_is_refused_and_reported_once_a_minute() -> None:
    with head(KEY) as recording, agent(OTHER_KEY, recording.link.port) as link:
        assert "key" in refusal(link, b"report")  # after several attempts
        assert link.why_not_connected() == link.refusal
        assert "was refused" in refused(recording, "key of this run")
        assert not recording.reports
        assert len(recording.refused) == len(set(recording.refused)) <= 2
        with agent(KEY, recording.link.port) as right:
            assert exchange(right, b"right") == b"right"


def test_the_public_key_of_the_head_alone_does_not_admit() -> None:
    with (
        head(KEY) as recording,
        raw_peer(recording.link.port, server=KEY, client=OTHER_KEY) as peer,
    ):
        peer.send_multipart([Header(MessageKind.REPORT, bytes(8), 1, "1").encode()])
        sentence = refused(recording, "its key is not the key of this run")
        assert "127.0.0.1" in sentence
        assert not recording.reports


def test_a_missing_key_is_refused_and_reported_and_another_protocol_changes_nothing() -> None:
    # The greeting of ZeroMQ's protocol with the mechanism that has no key.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    with head(KEY) as recording:
        with socket.create_connection((LOOPBACK, recording.link.port), 60.0) as client:
            wait_for(lambda: recording.link._accepted)
            client.sendall(greeting)
            assert "127.0.0.1" in refused(recording, "encrypted")
        with socket.create_connection((LOOPBACK, recording.link.port), 60.0) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: head\r\n\r\n" + bytes(200))
            with contextlib.suppress(ConnectionResetError):
                assert not client.recv(1000).startswith(b"HTTP")
        with raw_peer(recording.link.port, server=None, client=None) as peer:
            peer.send_multipart([Header(MessageKind.REPORT, bytes(8), 1, "1").encode()])
            with agent(KEY, recording.link.port) as link:
                assert exchange(link, b"report") == b"report"
        assert recording.reports == [("1", b"report")]


def test_an_agent_connects_when_another_program_made_way_for_the_head() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        with agent(KEY, port) as link:
            wait_for(lambda: link.exchange(b"report", 0.0) is None)
            other, _ = listener.accept()
            with other:
                other.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(100))
                with contextlib.suppress(ConnectionResetError):
                    wait_for(lambda: other.recv(1000), wanted=lambda data: data == b"")
            listener.close()
            with head(KEY, port=port):
                assert exchange(link, b"report") == b"report"


def test_an_agent_whose_key_is_refused_keeps_trying() -> None:
    # Its head has the right key, but admits only another agent key.
    with head(KEY) as recording:
        recording.link._agent_public = b"x" * 40
        with agent(KEY, recording.link.port) as link:
            assert refusal(link, b"report").endswith("refuses the key of this node.")
            recording.link._agent_public = curve_key(KEY.agent_secret)[0]
            assert exchange(link, b"report") == b"report"


def test_a_probe_of_the_head_is_not_reported() -> None:
    with head(KEY) as recording:
        for _ in range(5):
            probe(LOOPBACK, recording.link.port, 10.0)
        with agent(KEY, recording.link.port) as link:
            exchange(link, b"report")
        assert not recording.refused


# -- identities ------------------------------------------------------------------------------------


def test_connections_without_the_key_do_not_take_all_file_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ltui.training.nodes.link_wire._HANDSHAKE_MS", 600_000)
    key = LinkKey.generate()
    with head(key) as recording, agent(key, recording.link.port) as first:
        wait_for(lambda: first.exchange(b"1", 1.0))
        before, count = len(os.listdir("/proc/self/fd")), MAX_STRANGERS + 100
        with contextlib.ExitStack() as strangers:
            for _ in range(count):
                stranger = socket.create_connection((LOOPBACK, recording.link.port))
                strangers.enter_context(stranger)
            most = before + count + MAX_STRANGERS + 10
            wait_for(lambda: len(os.listdir("/proc/self/fd")) <= most)
            assert first.exchange(b"2", 60.0) == b"2"
            with agent(key, recording.link.port, "2") as second:
                assert wait_for(lambda: second.exchange(b"3", 1.0)) == b"3"


def test_a_second_agent_of_one_node_is_refused() -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as first:
        exchange(first, b"first")
        with agent(KEY, recording.link.port) as second:
            text = refusal(second, b"second")
            assert "node 1 is already connected from 127.0.0.1" in text
            assert "already connected" in refused(recording, "already")
            assert exchange(first, b"first again") == b"first again"
            assert all(report.startswith(b"first") for _, report in recording.reports)
            first.close()
            assert exchange(second, b"second") == b"second"
            assert second.refusal is None


# -- reconnection ----------------------------------------------------------------------------------


def test_the_head_comes_back_on_the_same_port_and_one_with_another_key_gets_nothing() -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as link:
        exchange(link, b"before")
        port = recording.link.port
        for life in range(3):
            recording.link.close()
            assert link.exchange(b"away", 0.2) is None
            with head(KEY, port=port):
                assert exchange(link, b"%d" % life) == b"%d" % life
                assert link.connected
        with head(OTHER_KEY, port=port) as other:
            assert "key" in refusal(link, b"away")
            assert not other.reports


_HEAD = """
import os, sys, time
from ltui.training.nodes.head_link import HeadLink
from ltui.training.nodes.link_key import LinkKey
key = LinkKey.find(None, os.environ)
link = HeadLink(key, "127.0.0.1", int(sys.argv[1]), lambda _, payload: payload, print)
print(link.port, flush=True)
time.sleep(600)
"""


def _start_head(port: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HEAD, str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LTUI_NODE_KEY": KEY.text},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_killed_and_a_frozen_head() -> None:
    process, port = _start_head(0)
    try:
        with agent(KEY, port) as link:
            exchange(link, b"before")
            process.kill()
            process.wait()
            wait_for(lambda: not link.connected)
            process, _ = _start_head(port)
            assert exchange(link, b"after its death") == b"after its death"
            freeze(process.pid)
            assert link.exchange(b"frozen", 0.5) is None
            wait_for(lambda: not link.connected)  # its heartbeats have stopped
            assert "frozen" in (link.why_not_connected() or "")
            os.kill(process.pid, signal.SIGCONT)
            assert exchange(link, b"continued") == b"continued"
    finally:
        process.kill()
        process.wait()


# -- peers that misbehave --------------------------------------------------------------------------


def test_an_agent_that_does_not_read_blocks_nobody() -> None:
    with (
        head(KEY) as recording,
        raw_peer(recording.link.port, server=KEY, client=KEY) as slow,
        agent(KEY, recording.link.port) as link,
    ):
        options(slow, RCVHWM=1, RCVBUF=4096)
        recording.orders = lambda identity, report: (
            bytes(1_000_000) if identity == "slow" else report
        )
        for number in range(1, 101):
            slow.send_multipart([Header(MessageKind.REPORT, b"12345678", number, "slow").encode()])
            if number % 10 == 0:
                assert exchange(link, b"%d" % number) == b"%d" % number
        wait_for(lambda: recording.link.dropped_orders > 0)
        assert exchange(link, b"end") == b"end"


def _malformed() -> list[list[bytes]]:
    good = Header(MessageKind.REPORT, b"12345678", 1, "1").encode()
    generator = random.Random(5)
    return [
        [b""],
        [b"", b""],
        [b"LTUI"],
        [b"X" + good[1:]],
        [good[:4] + b"\x63" + good[5:]],  # another version
        [good[:5] + b"\x09" + good[6:]],  # unknown kind
        [Header(MessageKind.ORDERS, b"12345678", 1, "1").encode()],
        [Header(MessageKind.REPORT, b"12345678", 1, "").encode()],
        [good + b"\xff\x00/../"],
        [good + b"x" * 100],
        [good, b"", b""],
        [good] + [bytes(MAX_MESSAGE_BYTES // 4)] * 5,
        *([generator.randbytes(generator.randrange(60))] for _ in range(50)),
    ]


def test_malformed_messages_are_refused_and_change_nothing() -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as link:
        exchange(link, b"before")
        for frames in _malformed():
            with raw_peer(recording.link.port, server=KEY, client=KEY) as peer:
                options(peer, RCVTIMEO=60_000)
                peer.send_multipart(frames)
                answer, reason = peer.recv_multipart()
                assert decode_header(answer).kind is MessageKind.REFUSED
                assert reason
        assert exchange(link, b"after") == b"after"
        assert {identity for identity, _ in recording.reports} == {"1"}
        assert refused(recording, "install the same version of ltui on every node")


def test_an_agent_of_another_version_gets_the_sentence_in_its_version() -> None:
    """A report of version 1 had several frames after its header."""
    header = Header(MessageKind.REPORT, b"12345678", 1, "1", version=1).encode()
    with (
        head(KEY) as recording,
        raw_peer(recording.link.port, server=KEY, client=KEY) as peer,
    ):
        options(peer, RCVTIMEO=60_000)
        peer.send_multipart([header, b'{"protocol": 1}', b"", b"", b""])
        answer, reason = peer.recv_multipart()
        assert answer[4] == 1
        assert b"it uses version 1 of the protocol between nodes" in reason
        assert refused(recording, "install the same version of ltui on every node")
        assert recording.reports == []


@contextlib.contextmanager
def bare_head() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """The socket of a head that a test answers by hand, and its port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        options(router, CURVE_SERVER=1, LINGER=0, RCVTIMEO=60_000)
        router.setsockopt(zmq.CURVE_SECRETKEY, curve_key(KEY.head_secret)[1])
        yield router, router.bind_to_random_port(f"tcp://{LOOPBACK}")
    finally:
        context.destroy(linger=0)


def test_an_agent_shows_the_refusal_of_a_head_of_another_version() -> None:
    with bare_head() as (router, port), agent(KEY, port) as link:
        wait_for(lambda: link.connected)
        assert link.exchange(b"report", 0.0) is None
        route, *_ = router.recv_multipart()
        orders = Header(MessageKind.ORDERS, bytes(8), 1, version=1).encode()
        refusal_of_1 = Header(MessageKind.REFUSED, bytes(8), 0, version=1).encode()
        router.send_multipart([route, orders, b"orders"])
        router.send_multipart([route, refusal_of_1, b"it uses version 2"])
        assert "refuses this node: it uses version 2." in refusal(link, b"report")


def test_a_frame_over_the_limit_ends_its_connection_only() -> None:
    with head(KEY) as recording, agent(KEY, recording.link.port) as link:
        exchange(link, b"before")
        with raw_peer(recording.link.port, server=KEY, client=KEY) as peer:
            good = Header(MessageKind.REPORT, b"12345678", 1, "2").encode()
            peer.send_multipart([good, bytes(MAX_MESSAGE_BYTES + 100_000)])
            assert exchange(link, b"after") == b"after"
        assert {identity for identity, _ in recording.reports} == {"1"}


@given(st.binary(max_size=80), st.booleans())
def test_any_header_decodes_or_is_malformed(data: bytes, begins_well: bool) -> None:
    good = Header(MessageKind.REPORT, b"12345678", 7, "node-1")
    assert decode_header(good.encode()) == good
    frame = good.encode()[:5] + data if begins_well else data
    with contextlib.suppress(MalformedMessageError):
        assert decode_header(frame).encode()[:4] == b"LTUI"


def test_an_agent_ignores_malformed_orders() -> None:
    with bare_head() as (router, port), agent(KEY, port) as link:
        wait_for(lambda: link.connected)
        assert link.exchange(b"report", 0.0) is None
        route, encoded, _ = router.recv_multipart()
        header = decode_header(encoded)
        stranger = Header(MessageKind.ORDERS, b"stranger", header.number).encode()
        future = Header(MessageKind.ORDERS, header.instance, header.number + 9).encode()
        for frames in ([b""], [b"junk", b"x"], [encoded], [stranger, b"x"], [future, b"x"]):
            router.send_multipart([route, *frames])
        answer = Header(MessageKind.ORDERS, header.instance, header.number).encode()
        router.send_multipart([route, answer, b"right"])
        assert wait_for(lambda: link.exchange(b"report", 0.05)) == b"right"


# -- sentences -------------------------------------------------------------------------------------


def test_a_missing_pyzmq_is_one_sentence() -> None:
    program = (
        "import sys; sys.modules['zmq'] = None\n"
        "from ltui.training.problem import ProblemError\n"
        "try: import ltui.training.nodes.head_link\n"
        "except ProblemError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert "pyzmq cannot be imported" in done.stdout
    assert "pip install pyzmq" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_one_sentence_a_minute_about_a_refused_connection_counts_those_between() -> None:
    log = RefusalLog()
    assert log.add("10.0.0.2", "its key is wrong", 5.0) == (
        "A connection from 10.0.0.2 was refused: its key is wrong."
    )
    for n in range(7):
        assert log.add("10.0.0.2", "its key is wrong", 6.0 + n) is None
    assert log.add("10.0.0.2", "its version is old", 6.0) is not None
    assert log.add("10.0.0.3", "its key is wrong", 6.0) is not None
    assert log.add("10.0.0.2", "its key is wrong", 5.0 + REPEAT_S) == (
        "A connection from 10.0.0.2 was refused (7 more times since the last report): "
        "its key is wrong."
    )


def test_many_addresses_fill_neither_the_log_nor_the_memory() -> None:
    log = RefusalLog()
    sentences = [log.add(f"10.0.{n // 256}.{n % 256}", "its key is wrong", 1.0) for n in range(999)]
    assert sum(s is not None for s in sentences) == MAX_PER_MINUTE
    assert log.add("10.1.0.0", "its key is wrong", 62.0) is not None
    for n in range(2, 5000):
        log.add(f"address {n}", "its key is wrong", n * 60.0)
    assert len(log._entries) <= 256
