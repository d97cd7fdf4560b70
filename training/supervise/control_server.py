"""Server of the control socket: answers every client in a thread of its own.

The server holds the latest snapshot, which the supervisor's loop publishes. Other commands are
passed to a handler, which may wait for the loop. So ``status`` and ``ping`` never wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ltui.training.json_codec import to_json
from ltui.training.process.identity import peer_uid
from ltui.training.state.run_snapshot import RunSnapshot

_REQUEST_BYTES = 1 << 16
"""Maximum number of bytes of one request."""
_MAX_CONNECTIONS = 64
"""Maximum number of clients that are connected at the same time."""
_IDLE_S = 10.0
"""Seconds after which a client is disconnected that neither sends a request nor reads an answer."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the answer to a command other than ping and status, or raises ``ValueError``.

It is called in the thread of the client, and may wait for a limited time, as clients are limited.
"""


class ControlServer:
    """Listens at ``path`` (0600) until ``close``; refuses other users."""

    def __init__(self, path: Path, link_path: Path, handler: Handler) -> None:
        """``link_path`` is where clients look: ``path`` itself or a symbolic link to it."""
        self._paths = {path, link_path}
        self._handler = handler
        self._published: tuple[RunSnapshot, bytes | None] | None = None
        self._clients: set[socket.socket] = set()
        self._closing = False
        self._listener = _listen(path)
        if link_path != path:
            link_path.unlink(missing_ok=True)
            link_path.symlink_to(path)
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._thread.start()

    def publish(self, snapshot: RunSnapshot) -> None:
        """Set the snapshot that ``status`` returns from now on."""
        self._published = (snapshot, None)

    def close(self) -> None:
        """Stop listening and remove the socket. Answers that are being sent are completed."""
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._thread.join(2.0)
        self._listener.close()
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RD)
        for path in self._paths:
            with contextlib.suppress(OSError):
                path.unlink()

    # -- the threads of the server -------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if not self._closing:
                    time.sleep(0.1)  # too many files are open
                continue
            if peer_uid(client) != os.getuid() or len(self._clients) >= _MAX_CONNECTIONS:
                client.close()
                continue
            client.settimeout(_IDLE_S)
            self._clients.add(client)
            thread = threading.Thread(
                target=self._serve, args=(client,), name="control client", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # too many threads are running
                self._clients.discard(client)
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), client, client.makefile("rb") as requests:
                # A longer request, and one without a line break, ends the connection.
                while (line := requests.readline(_REQUEST_BYTES)).endswith(b"\n"):
                    # After a pause of this process. The client has said that nothing was changed.
                    if _has_left(client):
                        break
                    client.sendall(self._answer(line) + b"\n")
        finally:
            self._clients.discard(client)

    def _answer(self, line: bytes) -> bytes:
        try:
            request = json.loads(line)
            command = request["cmd"]
        except (ValueError, KeyError, TypeError, RecursionError):
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
            return json.dumps(self._handler(request)).encode()
        except ValueError as error:
            return _refusal(str(error))
        except Exception as error:  # noqa: BLE001 - a request must not end its thread unanswered
            # One line, because a client may send such requests without end.
            print(f"request {str(command)[:40]!r} failed: {error!r:.200}", file=sys.stderr)
            return _refusal(f"this request cannot be carried out ({type(error).__name__}).")

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


def _has_left(client: socket.socket) -> bool:
    """Return True if the client has closed the connection, and so waits for no answer."""
    poll = select.poll()
    # Set only when both directions are closed: a client may close the one in which it sends.
    poll.register(client, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _listen(path: Path) -> socket.socket:
    """Return a listening socket that is created with mode 0600.

    An existing file is removed: the run lock guarantees that no other supervisor is listening.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(_MAX_CONNECTIONS)
    return listener
