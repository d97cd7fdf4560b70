"""Wire format of the link between head and agents, and the options of its sockets.

A message has a header frame and a payload frame, which the link does not interpret. The only module
besides ``head_link`` and ``agent_link`` that imports pyzmq; only runs on several machines import
these modules, because the import takes about 40 ms.

Rate limit for the sentences about refused connections: a peer may try many times a second. Time is
an argument.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from msgspec import Struct

from ltui.training.problem import ProblemError

REPEAT_S = 60.0
"""Seconds in which a refusal of one address for one reason is reported once."""
MAX_PER_MINUTE = 20
"""Maximum number of sentences in one minute, whatever their addresses."""
_MAX_ENTRIES = 256


class _Entry(Struct):
    reported_s: float
    unreported: int = 0


class RefusalLog:
    """Decides which refusals are reported, and counts those between."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._minute_began_s = float("-inf")
        self._in_this_minute = 0

    def add(self, address: str, reason: str, now_s: float) -> str | None:
        """Return the sentence to report now; None if it was reported a short time ago."""
        entry = self._entries.get((address, reason))
        if entry is not None and now_s - entry.reported_s < REPEAT_S:
            entry.unreported += 1
            return None
        if now_s - self._minute_began_s >= 60.0:
            self._minute_began_s, self._in_this_minute = now_s, 0
        self._in_this_minute += 1
        if self._in_this_minute > MAX_PER_MINUTE:
            return None
        before = entry.unreported if entry is not None else 0
        self._entries[address, reason] = _Entry(now_s)
        self._entries.move_to_end((address, reason))
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)
        times = f" ({before} more times since the last report)" if before else ""
        return f"A connection from {address} was refused{times}: {reason}."


try:
    import zmq as zmq  # exported to the two links, so that the error below has one place
except ImportError as missing:
    raise ProblemError.of(
        where="several machines",
        what=f"the Python package pyzmq cannot be imported on this node ({missing}).",
        remedy="Run `pip install pyzmq` in the environment of ltui, on every node.",
    ) from missing

PROTOCOL_VERSION = 2
"""Version of this format and of the messages. Increase it with every change that the other side
would misread."""
MAX_MESSAGE_BYTES = 16 << 20
"""Maximum number of bytes of the payload of one message."""
HEARTBEAT_MS = 2000
"""Milliseconds between two heartbeats of a connection."""
HEARTBEAT_TIMEOUT_MS = 4000
"""Milliseconds without an answer to a heartbeat after which a connection is closed."""
ZAP_DOMAIN = b"ltui"

_MAGIC = b"LTUI"
_HEADER = struct.Struct("<4sBBxx8sQ")
_IDENTITY = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_QUEUED_MESSAGES = 2
"""Messages in each direction that wait in one connection; more are not sent."""
_HANDSHAKE_MS = 5000
_CONNECT_TIMEOUT_MS = 1500
_FIRST_RECONNECT_MS = 100
_LONGEST_RECONNECT_MS = 800
_BACKLOG = 512


class MessageKind(IntEnum):
    """What a message is."""

    REPORT = 1
    """Agent to head; the head answers with ORDERS or REFUSED of the same number."""
    ORDERS = 2
    REFUSED = 3
    """Head to agent: a sentence that says why the head does not use its reports."""
    WAKE = 4
    """Head to agent: report at once."""


class MalformedMessageError(ValueError):
    """Raised for a message that is not one of this protocol version; its text is the reason."""


class Header(Struct, frozen=True):
    """First frame of every message."""

    kind: MessageKind
    instance: bytes
    """Eight random bytes of the agent's link, which tell two agents of one identity apart."""
    number: int
    """Number of the report, from 1; an answer repeats it."""
    identity: str = ""
    """Identity of the agent, in reports."""
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        fixed = _HEADER.pack(_MAGIC, self.version, self.kind, self.instance, self.number)
        return fixed + self.identity.encode("ascii")


def version_of(frame: bytes) -> int:
    """Return the protocol version of whoever sent a header; the own one if it is no header."""
    return frame[4] if len(frame) >= _HEADER.size and frame[:4] == _MAGIC else PROTOCOL_VERSION


def decode_header(frame: bytes) -> Header:
    """Decode a header. Raise ``MalformedMessageError``.

    A refusal is the same in every version, so that a node of another one can show its sentence.
    """
    if len(frame) < _HEADER.size or frame[:4] != _MAGIC:
        raise MalformedMessageError("its message has no header of ltui")
    _, version, kind, instance, number = _HEADER.unpack_from(frame)
    if version != PROTOCOL_VERSION and kind != MessageKind.REFUSED:
        raise MalformedMessageError(
            f"it uses version {version} of the protocol between nodes, and this node uses "
            f"version {PROTOCOL_VERSION}; install the same version of ltui on every node"
        )
    try:
        identity = frame[_HEADER.size :].decode("ascii")
        if identity and _IDENTITY.fullmatch(identity) is None:
            raise MalformedMessageError("its identity is not valid")
        return Header(MessageKind(kind), instance, number, identity, version)
    except ValueError as error:
        raise MalformedMessageError("its message has an invalid header") from error


def check_identity(identity: str) -> None:
    assert _IDENTITY.fullmatch(identity), identity


def check_size(payload: bytes) -> None:
    """Raise ``ValueError`` for a message that the other side would refuse."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is too large")


def endpoint(address: str, port: int | None) -> str:
    """Return the endpoint of a numeric address; a port of None means a free one."""
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{'*' if port is None else port}"


def curve_key(secret: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret key, in the encoding of ZeroMQ, of 32 secret bytes."""
    encoded = z85_encode(secret)
    return zmq.curve_public(encoded), encoded


def z85_encode(data: bytes) -> bytes:
    """Encode bytes as ZeroMQ's RFC 32 describes."""
    from zmq.utils import z85  # a private detail of this function

    return z85.encode(data)


def set_common_options(socket: zmq.Socket[Any], address: str) -> None:
    """Set the options that head and agents share: nothing waits, and nothing is kept for long."""
    options = {
        zmq.IPV6: int(":" in address),
        zmq.LINGER: 0,
        zmq.SNDHWM: _QUEUED_MESSAGES,
        zmq.RCVHWM: _QUEUED_MESSAGES,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        zmq.HEARTBEAT_TTL: HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS,
        zmq.RECONNECT_IVL: _FIRST_RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: _LONGEST_RECONNECT_MS,
        zmq.CONNECT_TIMEOUT: _CONNECT_TIMEOUT_MS,
        zmq.BACKLOG: _BACKLOG,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def monitor_event(frames: Sequence[bytes]) -> tuple[int, int, str]:
    """Return the event, its value and its endpoint from a message of a socket monitor."""
    event, value = struct.unpack("=Hi", frames[0])
    return event, value, frames[1].decode("utf-8", "replace")
