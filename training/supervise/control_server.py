"""Server of the control socket: answers requests at once, in its own thread.

The server holds the latest snapshot, which the supervisor's loop publishes, and passes commands to
a handler, which queues them for the loop. So an answer never waits for the loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ltui.training.state.run_snapshot import RunSnapshot, to_json

_REQUEST_BYTES = 1 << 16
"""Maximum number of bytes of one request."""
_MAX_CONNECTIONS = 64
"""Maximum number of clients that are connected at the same time."""

Handler = Callable[[dict[str, Any]], "dict[str, Any] | Future[dict[str, Any]]"]
"""Handles a command other than ping and status, in the server's thread.

It returns the answer or a future of it. Other requests are answered while a future is pending.
"""


@dataclass
class _Connection:
    """One connected client."""

    socket: socket.socket
    unread: bytes = b""
    unsent: deque[memoryview] = field(default_factory=deque)


class ControlServer:
    """Listens at ``path`` (0600) until ``close``; refuses other users."""

    def __init__(self, path: Path, link_path: Path, handler: Handler) -> None:
        """``link_path`` is where clients look: ``path`` itself or a symbolic link to it."""
        self._path = path
        self._link_path = link_path
        self._handler = handler
        self._published: tuple[RunSnapshot, bytes | None] | None = None
        self._listener = _listen(path)
        if link_path != path:
            with contextlib.suppress(FileNotFoundError):
                link_path.unlink()
            link_path.symlink_to(path)
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._closing = False
        self._late: deque[tuple[_Connection, Future[dict[str, Any]]]] = deque()
        """Futures that have completed and whose answers are still to be sent."""
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def publish(self, snapshot: RunSnapshot) -> None:
        """Set the snapshot that ``status`` returns from now on."""
        self._published = (snapshot, None)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._closing = True
        self._wake_in.send(b"x")
        self._thread.join(2.0)
        for path in {self._path, self._link_path}:
            with contextlib.suppress(OSError):
                path.unlink()

    # -- the server's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_out:
                    self._wake_out.recv(4096)
                    self._send_late()
                elif key.data is not None:
                    self._exchange(key.data, events)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake_in.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        client.setblocking(False)
        if _peer_uid(client) != os.getuid() or len(self._selector.get_map()) > _MAX_CONNECTIONS:
            client.close()
            return
        self._selector.register(client, selectors.EVENT_READ, _Connection(client))

    def _exchange(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._receive(connection)
            if events & selectors.EVENT_WRITE:
                self._send(connection)
        except (OSError, ValueError):
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(65536)
        if not data:
            self._drop(connection)
            return
        connection.unread += data
        while b"\n" in connection.unread:
            line, _, connection.unread = connection.unread.partition(b"\n")
            answer = self._answer(line)
            if isinstance(answer, Future):
                answer.add_done_callback(partial(self._queue_late_answer, connection))
            else:
                connection.unsent.append(memoryview(answer + b"\n"))
        if len(connection.unread) > _REQUEST_BYTES:
            raise ValueError("request too long")
        self._send(connection)

    def _queue_late_answer(self, connection: _Connection, done: Future[dict[str, Any]]) -> None:
        """Queue the answer of a completed future. May be called from any thread."""
        self._late.append((connection, done))
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def _send_late(self) -> None:
        while self._late:
            connection, done = self._late.popleft()
            try:
                answer = json.dumps(done.result()).encode()
            except ValueError as error:
                answer = _refusal(str(error))
            connection.unsent.append(memoryview(answer + b"\n"))
            try:
                self._send(connection)
            except (OSError, ValueError, KeyError):
                self._drop(connection)

    def _send(self, connection: _Connection) -> None:
        while connection.unsent:
            try:
                sent = connection.socket.send(connection.unsent[0])
            except BlockingIOError:
                break
            if sent == len(connection.unsent[0]):
                connection.unsent.popleft()
            else:
                connection.unsent[0] = connection.unsent[0][sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _answer(self, line: bytes) -> bytes | Future[dict[str, Any]]:
        try:
            request = json.loads(line)
            command = request["cmd"]
        except (ValueError, KeyError, TypeError):
            return _refusal("this is not a command.")
        published = self._published
        if command == "status" and published is not None:
            return self._status(*published)
        if command == "ping":
            state = published[0].state.value if published is not None else "starting"
            return json.dumps({"ok": True, "pid": os.getpid(), "state": state}).encode()
        if command == "status":
            return _refusal("the supervisor is still starting.")
        try:
            answer = self._handler(request)
            return answer if isinstance(answer, Future) else json.dumps(answer).encode()
        except ValueError as error:
            return _refusal(str(error))

    def _status(self, snapshot: RunSnapshot, answer: bytes | None) -> bytes:
        """Return the encoded snapshot. It is encoded once for all clients."""
        if answer is None:
            answer = json.dumps({"ok": True, "snapshot": to_json(snapshot)}).encode()
            published = self._published
            if published is not None and published[0] is snapshot:
                self._published = (snapshot, answer)
        return answer


def _refusal(sentence: str) -> bytes:
    return json.dumps({"ok": False, "error": sentence}).encode()


def _peer_uid(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _listen(path: Path) -> socket.socket:
    """Return a listening socket that is created with mode 0600.

    An existing file is removed: the run lock guarantees that no other supervisor is listening.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(16)
    listener.setblocking(False)
    return listener
