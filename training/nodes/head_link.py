"""Link of the head: receives the reports of all agents in one thread, and answers each with orders.

The link is encrypted and authenticated by CURVE. It knows identities and payloads, but not what
the payloads mean.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.link_wire import (
    ZAP_DOMAIN,
    Header,
    MalformedMessageError,
    MessageKind,
    RefusalLog,
    check_size,
    curve_key,
    decode_header,
    endpoint,
    monitor_event,
    set_common_options,
    version_of,
    z85_encode,
    zmq,
)
from ltui.training.nodes.node_address import format_host_and_port, resolve
from ltui.training.problem import ProblemError

_REPORTS_PER_TURN = 64
"""Maximum number of reports that are answered before the other sockets are served."""
_ERROR_PAUSE_S = 0.1
_CLOSE_S = 0.1
"""Seconds for which a link that is closed still sends the last orders.

Closing the socket with a linger time instead aborts the process in libzmq 4.3.5 (assertion
``!_io_error``) if a peer does not read.
"""
_MANY_AGENTS = 32
_PAUSE_S = 0.01
"""Seconds between two turns with many agents: one turn for several reports halves their cost."""
# As plain numbers, because an operation with members of an enumeration costs as much as a send.
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

MAX_STRANGERS = 256
"""Connections that have not reported yet and may be open at once. One more ends the oldest of them,
so that nobody without the key takes all file descriptors of the supervisor."""

_WHERE = "address of the head"

_UNKNOWN_FAILURES = 3
"""Failed handshakes without a known address, in a row, after which one is reported."""

_UNKNOWN = "an unknown address"
_NO_SUCH_KEY = "its key is not the key of this run"
_NO_KEY = "it does not use the encrypted protocol of ltui, or its key is not the key of this run"


class AgentPeer(Struct, frozen=True):
    """Agent whose reports the head uses."""

    identity: str
    address: str
    """Numeric address that its connection comes from."""
    route: bytes
    """Routing id of its connection."""
    instance: bytes


class HeadLink:
    """Socket of the head and its thread.

    ``on_report(identity, payload)`` is called in this thread for every report; what it returns is
    sent as the orders, or nothing if it returns None. It must be quick, since all agents wait for
    it. If it raises, the traceback is printed and the report is not answered.

    ``on_refused(sentence)`` is called in this thread when a peer is refused: wrong or missing key,
    other protocol version, malformed message, or an identity that another agent has. Sentences
    are limited to one a minute for one address and reason.

    Of two agents with one identity, the one that connected first stays until its connection ends.
    Nothing ever blocks: orders for an agent that does not read are dropped, and its next report is
    answered again.
    """

    def __init__(
        self,
        key: LinkKey,
        address: str,
        port: int,
        on_report: Callable[[str, bytes], bytes | None],
        on_refused: Callable[[str], None],
    ) -> None:
        """Bind ``port`` of ``address``, and no other address; port 0 chooses a free one.

        Raise ``ProblemError`` if the address does not belong to this machine or the port is taken.
        """
        self._on_report = on_report
        self._on_refused = on_refused
        self._refusals = RefusalLog()
        self._agent_public, _ = curve_key(key.agent_secret)
        self._peers: dict[str, AgentPeer] = {}
        self._accepted: dict[int, str] = {}  # address of each connection by its file descriptor
        self._strangers: dict[int, None] = {}  # connections that have not reported, oldest first
        self._handshake_failed = False
        self._unknown_failures = 0
        self._wakes: deque[str] = deque()
        self._closing = False
        self.dropped_orders = 0
        """Number of answers that were not sent because the agent did not read."""
        self.address = resolve(address, _WHERE)[0]
        """Numeric address that the head is bound to."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            # The authenticator comes first: no connection is admitted without it.
            self._authenticator = self._context.socket(zmq.REP)
            self._authenticator.setsockopt(zmq.LINGER, 0)
            self._authenticator.bind("inproc://zeromq.zap.01")
            self._router = self._context.socket(zmq.ROUTER)
            set_common_options(self._router, self.address)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
            self._router.setsockopt(zmq.CURVE_SECRETKEY, curve_key(key.head_secret)[1])
            self._router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            self._monitor = self._router.get_monitor_socket(
                zmq.EVENT_ACCEPTED
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            )
            self._bind(port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rpartition(":")[2])
        self._signal_lock = threading.Lock()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="head link", daemon=True)
        self._thread.start()

    def wake(self, identity: str) -> None:
        """Ask an agent to report at once. Does nothing if it is not connected. Any thread."""
        self._wakes.append(identity)
        self._notify()

    def peers(self) -> dict[str, AgentPeer]:
        """Return the agents that have reported, by identity, connected or not. Any thread."""
        return dict(self._peers)

    def close(self) -> None:
        """Send the last orders, close all connections and end the thread. May be called twice."""
        self._closing = True
        self._notify()
        self._thread.join()
        with self._signal_lock:
            if self._signal >= 0:
                os.close(self._signal)
            self._signal = -1

    # -- start ---------------------------------------------------------------------------------

    def _bind(self, port: int) -> None:
        try:
            self._router.bind(endpoint(self.address, port or None))
        except zmq.ZMQError as error:
            place = format_host_and_port(self.address, port)
            if error.errno == zmq.EADDRINUSE:
                what, remedy = (
                    f"port {port} is in use.",
                    "Choose another port, or 0 for a free one.",
                )
            elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                what = f"{self.address} is not an address of this machine."
                remedy = "Choose one of those that `ip address` shows."
            else:
                what = f"the port cannot be opened ({error.strerror})."
                remedy = "Choose another address or port."
            raise ProblemError.of(where=place, what=what, remedy=remedy) from error

    def _notify(self) -> None:
        with self._signal_lock:
            if self._signal >= 0:
                os.eventfd_write(self._signal, 1)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._authenticator, self._monitor, self._signal):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                try:
                    self._turn(dict(poller.poll()))
                    if len(self._peers) >= _MANY_AGENTS:
                        time.sleep(_PAUSE_S)
                except Exception:  # noqa: BLE001 - top of a thread, which must go on
                    traceback.print_exc()
                    time.sleep(_ERROR_PAUSE_S)
        finally:
            self._monitor.close(0)
            # The last orders tell agents that the run is over.
            time.sleep(_CLOSE_S)
            self._context.destroy(linger=0)

    def _turn(self, ready: dict[object, int]) -> None:
        if self._monitor in ready:
            self._read_monitor()
        if self._authenticator in ready:
            self._authenticate()
        if self._signal in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._signal)
            while self._wakes:
                peer = self._peers.get(self._wakes.popleft())
                if peer is not None:
                    self._send(peer.route, Header(MessageKind.WAKE, peer.instance, 0))
        if self._router in ready:
            for _ in range(_REPORTS_PER_TURN):
                # This question is much cheaper than an exception for every report.
                if not int(self._router.getsockopt(zmq.EVENTS)) & _POLLIN:
                    break
                route, *parts = _receive_message(self._router)
                self._receive(route.bytes, parts)

    # -- reports -------------------------------------------------------------------------------

    def _receive(self, route: bytes, parts: list[zmq.Frame]) -> None:
        address = _peer_address(parts[0]) if parts else _UNKNOWN
        first = parts[0].bytes if parts else b""
        try:
            header = decode_header(first)
            if len(parts) > 2:
                raise MalformedMessageError("its message is no header with a payload")
            if header.kind is not MessageKind.REPORT or not header.identity:
                raise MalformedMessageError("its message is not a report")
        except MalformedMessageError as error:
            self._refuse(address, str(error))
            refusal = Header(MessageKind.REFUSED, bytes(8), 0, version=version_of(first))
            self._send(route, refusal, str(error).encode())
            return
        other = self._holder(header)
        if other is not None:
            reason = (
                f"node {header.identity} is already connected from {other.address}; every node of "
                "a run has one agent and a number of its own"
            )
            self._refuse(address, reason)
            refusal = Header(MessageKind.REFUSED, header.instance, header.number)
            self._send(route, refusal, reason.encode())
            return
        known = self._peers.get(header.identity)
        if known is None or known.route != route:
            self._strangers.pop(int(parts[0].get(zmq.SRCFD)), None)
        self._answer(route, address, header, b"".join(part.bytes for part in parts[1:]))

    def _answer(self, route: bytes, address: str, header: Header, payload: bytes) -> None:
        self._peers[header.identity] = AgentPeer(header.identity, address, route, header.instance)
        orders = self._on_report(header.identity, payload)
        if orders is not None:
            check_size(orders)
            answer = Header(MessageKind.ORDERS, header.instance, header.number)
            self._send(route, answer, orders)

    def _holder(self, header: Header) -> AgentPeer | None:
        """Return another agent that has the identity and is still connected."""
        peer = self._peers.get(header.identity)
        if peer is None or peer.instance == header.instance:
            return None
        # A message to a connection that has ended fails; to a living agent it is harmless.
        connected = self._send(peer.route, Header(MessageKind.WAKE, peer.instance, 0))
        return peer if connected else None

    def _send(self, route: bytes, header: Header, payload: bytes = b"") -> bool:
        """Send without waiting. Return False if the connection has ended."""
        try:
            self._router.send(route, _SEND_MORE)
            self._router.send(header.encode(), _SEND_MORE)
            self._router.send(payload, _NOBLOCK)
        except zmq.Again:
            self.dropped_orders += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    # -- admission -----------------------------------------------------------------------------

    def _authenticate(self) -> None:
        """Answer one request of the ZeroMQ Authentication Protocol (RFC 27)."""
        request = self._authenticator.recv_multipart(zmq.NOBLOCK)
        version, number, _, address, _, mechanism, *credentials = request
        admitted = mechanism == b"CURVE" and any(
            len(credential) == 32
            and hmac.compare_digest(z85_encode(credential), self._agent_public)
            for credential in credentials[:1]
        )
        status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self._authenticator.send_multipart([version, number, status, text, b"", b""], zmq.NOBLOCK)
        if not admitted:
            self._refuse(address.decode("ascii", "replace"), _NO_SUCH_KEY)

    def _read_monitor(self) -> None:
        """Read events of the router's connections, to report handshakes that failed.

        Only the end of a connection carries its file descriptor. It follows the failure directly,
        because one thread of ZeroMQ serves all connections.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                event, value, _ = monitor_event(self._monitor.recv_multipart(zmq.NOBLOCK))
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted[value] = _address_of(value)
                    self._strangers[value] = None
                    if len(self._strangers) > MAX_STRANGERS:
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        _end_connection(oldest)
                elif event == zmq.EVENT_DISCONNECTED:
                    address = self._accepted.pop(value, _UNKNOWN)
                    self._strangers.pop(value, None)
                    if self._handshake_failed:
                        self._refuse_handshake(address)
                    self._handshake_failed = False
                else:
                    # Without a protocol error the peer left early, as a probe does.
                    self._handshake_failed = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

    def _refuse_handshake(self, address: str) -> None:
        # A connection that ended at once has no address any more. A refused agent tries again.
        self._unknown_failures = self._unknown_failures + 1 if address == _UNKNOWN else 0
        if address != _UNKNOWN or self._unknown_failures == _UNKNOWN_FAILURES:
            self._refuse(address, _NO_KEY)

    def _refuse(self, address: str, reason: str) -> None:
        sentence = self._refusals.add(address, reason, time.monotonic())
        if sentence is not None:
            self._on_refused(sentence)


def _end_connection(descriptor: int) -> None:
    """Shut down a connection of ZeroMQ, which then closes it."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()


def _receive_message(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Receive the frames of a message that has arrived, without copying them."""
    frames = [socket.recv(_NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOBLOCK, copy=False))
    return frames


def _peer_address(frame: zmq.Frame) -> str:
    """Return the numeric address that a message came from."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return _UNKNOWN


def _address_of(descriptor: int) -> str:
    """Return the numeric address at the other end of a connection, which may have ended."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return _UNKNOWN
