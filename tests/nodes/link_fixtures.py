"""A head that records what reaches it, and peers that are not agents of ltui."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from ltui.training.nodes.agent_link import AgentLink
from ltui.training.nodes.head_link import HeadLink
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.link_wire import curve_key, endpoint
from tests.waiting import wait_for

LOOPBACK = "127.0.0.1"


class RecordingHead:
    """Head link that answers each report with ``orders``, or with its own payload."""

    def __init__(self, key: LinkKey, address: str = LOOPBACK, port: int = 0) -> None:
        self.reports: list[tuple[str, bytes]] = []
        self.refused: list[str] = []
        self.orders: Callable[[str, bytes], bytes | None] = lambda _, payload: payload
        self.open = threading.Event()
        """Reports are answered as long as this is set."""
        self.open.set()
        self.link = HeadLink(key, address, port, self._on_report, self.refused.append)

    def _on_report(self, identity: str, payload: bytes) -> bytes | None:
        self.reports.append((identity, payload))
        self.open.wait()
        return self.orders(identity, payload)


@contextlib.contextmanager
def head(key: LinkKey, address: str = LOOPBACK, port: int = 0) -> Iterator[RecordingHead]:
    recording = RecordingHead(key, address, port)
    try:
        yield recording
    finally:
        recording.open.set()
        recording.link.close()


@contextlib.contextmanager
def agent(
    key: LinkKey, port: int, identity: str = "1", host: str = LOOPBACK
) -> Iterator[AgentLink]:
    link = AgentLink(key, host, port, identity)
    try:
        yield link
    finally:
        link.close()


@contextlib.contextmanager
def raw_peer(
    port: int, *, server: LinkKey | None, client: LinkKey | None
) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER socket with the head's public key of ``server`` and the agent's of ``client``."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        if server is not None and client is not None:
            public, secret = curve_key(client.agent_secret)
            peer.setsockopt(zmq.CURVE_SERVERKEY, curve_key(server.head_secret)[0])
            peer.setsockopt(zmq.CURVE_PUBLICKEY, public)
            peer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        peer.connect(endpoint(LOOPBACK, port))
        yield peer
    finally:
        context.destroy(linger=0)


def exchange(link: AgentLink, report: bytes) -> bytes:
    """Exchange until an answer comes."""
    answer = wait_for(lambda: link.exchange(report, 5.0), wanted=lambda got: got is not None)
    return answer or b""


def refusal(link: AgentLink, report: bytes) -> str:
    """Exchange until the agent knows that it is refused."""

    def read() -> str | None:
        assert link.exchange(report, 0.2) is None
        return link.refusal

    return wait_for(read) or ""


def refused(recording: RecordingHead, text: str) -> str:
    """Wait for a sentence of the head about a refused peer."""

    def read() -> str:
        return next((s for s in list(recording.refused) if text in s), "")

    return wait_for(read)


def options(peer: zmq.Socket[Any], **values: int) -> None:
    for name, value in values.items():
        peer.setsockopt(getattr(zmq, name), value)


def freeze(pid: int) -> None:
    """Stop a process, and wait until all its threads have stopped."""

    def states() -> set[str]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}

    os.kill(pid, signal.SIGSTOP)
    wait_for(states, wanted=lambda found: found == {"T"})
