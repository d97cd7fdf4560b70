"""Link of an agent: sends reports to the head and returns its orders. It reconnects by itself.

The sockets are served by a thread of ZeroMQ, so heartbeats and reconnections need no call. All
methods belong to one thread, and wait only as long as their time limit says.
"""

from __future__ import annotations

import contextlib
import secrets
import time

from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.link_wire import (
    Header,
    MalformedMessageError,
    MessageKind,
    check_identity,
    check_size,
    curve_key,
    decode_header,
    endpoint,
    monitor_event,
    set_common_options,
    zmq,
)
from ltui.training.nodes.node_address import format_host_and_port, local_address_towards, resolve
from ltui.training.nodes.node_watch import ProbeResult, probe_all

_MAX_UNANSWERED = 2
"""Maximum number of reports without an answer in a connection."""
_RESEND_S = 2.0
"""Seconds after which a report is sent although too many are unanswered."""
_FAILED_HANDSHAKES = 3
"""Failed handshakes in a row after which the key is blamed. A head that closes may cause one."""

_FROZEN_S = 3.0
"""Seconds of a failed handshake after which the head is considered frozen."""

_RETRY_S = 2.0
"""Seconds until a connection whose handshake failed is tried again."""
_NO_EVENT_S = 8.0
"""Seconds without an event after which a connection is made anew. ZeroMQ does not reconnect after
a refused key or an answer in another protocol; otherwise each attempt gives an event in time."""

_LONGEST_WAIT_S = 0.5
_POLLIN = int(zmq.POLLIN)
_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


class AgentLink:
    """Connection of the agent ``identity`` to the head at ``host`` and ``port``.

    Creating a link does not wait for the head. A lost connection is noticed after six seconds at
    the latest, and renewed within a second after the head can be reached again, also if the head
    was restarted on the same port with the same key.
    """

    def __init__(self, key: LinkKey, host: str, port: int, identity: str) -> None:
        """``host`` is a name or a numeric address. Raise ``ProblemError`` if it has no address."""
        check_identity(identity)
        self._place = format_host_and_port(host, port)
        self._addresses = resolve(host, self._place)
        self._port = port
        self._identity = identity
        self._instance = secrets.token_bytes(8)
        self._number = 0
        self._answered = 0
        self._lost = 0  # reports up to this number were sent through connections that have ended
        self._sent_s = float("-inf")
        self._reply: bytes | None = None
        self._woken = False
        self._connected: set[str] = set()
        self._failed_handshakes = 0
        self._handshake_began_s = 0.0
        self.refusal: str | None = None
        """Sentence that says why the head refuses this agent; None if it does not, as far as known.

        A link that is refused keeps trying, so that a temporary reason passes.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._dealer = self._context.socket(zmq.DEALER)
            set_common_options(self._dealer, self._addresses[0])
            self._dealer.setsockopt(zmq.IPV6, int(any(":" in a for a in self._addresses)))
            # Nothing is queued for a connection that does not exist yet.
            self._dealer.setsockopt(zmq.IMMEDIATE, 1)
            self._dealer.setsockopt(zmq.CURVE_SERVERKEY, curve_key(key.head_secret)[0])
            public, secret = curve_key(key.agent_secret)
            self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self._monitor = self._dealer.get_monitor_socket()
            # A host name may have addresses at which the head does not listen.
            endpoints = [endpoint(address, port) for address in self._addresses]
            self._next_attempt_s = dict.fromkeys(endpoints, 0.0)
            self._paused = set(endpoints)
            self._connect_again()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def connected(self) -> bool:
        """True if a connection is established and authenticated."""
        self._receive()
        return bool(self._connected)

    @property
    def local_address(self) -> str | None:
        """Own numeric address that leads to the head, for a ``ProbeSocket``; None if no route."""
        return next(filter(None, map(local_address_towards, self._addresses)), None)

    def exchange(self, report: bytes, timeout_s: float) -> bytes | None:
        """Send a report and return the orders that answer it.

        If no answer comes within ``timeout_s``, return a late answer to an earlier report, or else
        None. If the head does not answer, reports are left out, so that none pile up on the way;
        a report must therefore not rely on the ones before it. None is also returned if the head
        refuses the agent: see ``refusal``.
        """
        check_size(report)
        deadline_s = time.monotonic() + timeout_s
        first: int | None = None  # number of this report
        number: int | None = None  # the same, or the one that it was sent again with
        while True:
            self._receive()
            # An answer may arrive after the event that its connection has ended.
            if first is not None and self._answered >= first:
                return self._take_reply()
            if number is not None and number <= self._lost:
                number = None
            if number is None and self._may_send():
                number = self._send(report)
                first = first or number
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return self._take_reply()
            self._wait(remaining_s, to_send=number is None)

    def answer(self) -> bytes | None:
        """Return orders that came after ``exchange`` had returned; None if there are none."""
        self._receive()
        return self._take_reply()

    def woken(self, timeout_s: float = 0.0) -> bool:
        """Wait until the head asks for a report, at most ``timeout_s``; return whether it has.

        A request that came during ``exchange`` counts as well, and each is returned once.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._receive()
            remaining_s = deadline_s - time.monotonic()
            if self._woken or remaining_s <= 0:
                woken, self._woken = self._woken, False
                return woken
            self._wait(remaining_s, to_send=False)

    def why_not_connected(self, timeout_s: float = 1.0) -> str | None:
        """Return a sentence that says why there is no connection; None if there is one.

        It connects to the head's port once more, to see how the machine answers.
        """
        if self.connected and self.refusal is None:
            return None
        if self.refusal is not None:
            return self.refusal
        results = probe_all({a: (a, self._port) for a in self._addresses}, timeout_s).values()
        if ProbeResult.ACCEPTED in results:
            return (
                f"{self._place} accepts connections but does not answer as the head of a run: "
                "another program listens there, or the head is frozen."
            )
        if ProbeResult.REFUSED in results:
            return f"Nothing listens at {self._place}: the head has ended or not started."
        return (
            f"{self._place} does not answer: its machine is down, the link is cut, or a firewall "
            "closes the port."
        )

    def close(self) -> None:
        """Close the connection at once. May be called twice."""
        self._monitor.close(0)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        unanswered = self._number - max(self._answered, self._lost)
        return unanswered < _MAX_UNANSWERED or time.monotonic() - self._sent_s >= _RESEND_S

    def _send(self, report: bytes) -> int | None:
        """Send a report without waiting and return its number; None if that is not possible."""
        header = Header(MessageKind.REPORT, self._instance, self._number + 1, self._identity)
        try:
            self._dealer.send_multipart([header.encode(), report], zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._number += 1
        self._sent_s = time.monotonic()
        return self._number

    def _wait(self, timeout_s: float, *, to_send: bool) -> None:
        """Wait for a message, an event, or the moment when a report can be sent."""
        events = zmq.POLLIN
        if to_send and self._may_send():
            events |= zmq.POLLOUT
        elif to_send:
            timeout_s = min(timeout_s, max(0.0, self._sent_s + _RESEND_S - time.monotonic()))
        self._poller.register(self._dealer, events)
        # A connection that has to be made anew is noticed between two waits.
        self._poller.poll(int(min(timeout_s, _LONGEST_WAIT_S) * 1e3) + 1)

    def _receive(self) -> None:
        """Take all messages and events that have arrived, and connect again where needed."""
        # This question is much cheaper than an exception, and is asked often.
        while int(self._monitor.getsockopt(zmq.EVENTS)) & _POLLIN:
            self._note_event(*monitor_event(self._monitor.recv_multipart(zmq.NOBLOCK)))
        while int(self._dealer.getsockopt(zmq.EVENTS)) & _POLLIN:
            header, *payload = self._dealer.recv_multipart(zmq.NOBLOCK)
            with contextlib.suppress(MalformedMessageError):
                self._note_message(decode_header(header), b"".join(payload))
        self._connect_again()

    def _note_message(self, header: Header, payload: bytes) -> None:
        if header.instance not in (self._instance, bytes(8)):
            return
        if header.kind is MessageKind.WAKE:
            self._woken = True
        elif header.kind is MessageKind.ORDERS:
            self.refusal = None
            if self._answered < header.number <= self._number:
                self._answered = header.number
                self._reply = payload
        elif header.kind is MessageKind.REFUSED:
            reason = payload[:1000].decode("utf-8", "replace")
            self.refusal = f"{self._place} refuses this node: {reason}."
            # A message that the head could not read has no number.
            self._answered = max(self._answered, header.number or self._number)

    def _note_event(self, event: int, _value: int, place: str) -> None:
        now_s = time.monotonic()
        if place not in self._paused:
            self._next_attempt_s[place] = now_s + _NO_EVENT_S
        if event == zmq.EVENT_CONNECTED:
            self._handshake_began_s = now_s
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected.add(place)
            self._failed_handshakes = 0
            self.refusal = None
        elif event == zmq.EVENT_DISCONNECTED:
            if place in self._connected:
                self._lost = self._number
            self._connected.discard(place)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._pause(place)
            self.refusal = f"{self._place} refuses the key of this node."
        elif event in _FAILED and now_s - self._handshake_began_s < _FROZEN_S:
            self._failed_handshakes += 1
            if self._failed_handshakes >= _FAILED_HANDSHAKES:
                self._pause(place)
                self.refusal = (
                    f"{self._place} closes the connection: the key of this node is not the key of "
                    "the run, or another program listens there."
                )

    def _pause(self, place: str) -> None:
        """Stop the attempts to connect, which ZeroMQ makes ten times a second, for a while."""
        self._paused.add(place)
        self._next_attempt_s[place] = time.monotonic() + _RETRY_S
        with contextlib.suppress(zmq.ZMQError):  # it has ended already
            self._dealer.disconnect(place)

    def _connect_again(self) -> None:
        now_s = time.monotonic()
        for place, next_s in self._next_attempt_s.items():
            if now_s < next_s or place in self._connected:
                continue
            if place not in self._paused:
                self._pause(place)
            self._paused.discard(place)
            self._next_attempt_s[place] = now_s + _NO_EVENT_S
            self._dealer.connect(place)

    def _take_reply(self) -> bytes | None:
        reply, self._reply = self._reply, None
        return reply
