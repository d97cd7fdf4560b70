"""Client of a supervisor's control socket: one JSON line per request and per answer.

The client keeps no connection or other state, so any thread may use it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from ltui.training.json_codec import parse_json
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder, lock_was_copied, peer_uid
from ltui.training.state.run_snapshot import RunSnapshot, snapshot_from_json
from ltui.training.store.run_directory import RunDir

STILL_STARTING = "its supervisor is still starting"
"""What is known of a run whose supervisor is too young to answer."""
_LINE_BYTES = 64 << 20


class NotSupervisedError(ProblemError):
    """No supervisor answers for the run: it ended, died, or does not respond."""


class ControlClient:
    """Sends commands to the supervisor of one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def request(self, command: dict[str, Any], timeout_s: float = 2.0) -> dict[str, Any]:
        """Send ``command`` and return the answer.

        Raises ``NotSupervisedError`` if no supervisor answers within ``timeout_s``, and
        ``ProblemError`` with the supervisor's explanation if it refuses the command.
        """
        try:
            answer = self._ask(command, timeout_s)
        except (OSError, ValueError) as error:
            text = _failure_text(error)
            if isinstance(error, TimeoutError) and command.get("cmd") not in ("ping", "status"):
                # The supervisor drops the request of a client that has left.
                text += " The request was withdrawn; nothing is changed."
            raise NotSupervisedError(self._problem(text)) from error
        if answer is None:
            raise NotSupervisedError(
                self._problem("its supervisor closed the connection without an answer.")
            )
        if not answer.get("ok"):
            raise ProblemError(self._problem(str(answer.get("error") or "the command failed.")))
        return answer

    def status(self, timeout_s: float = 1.0) -> RunSnapshot | None:
        """Return the current snapshot of the run, or None if no supervisor answers."""
        try:
            answer = self.request({"cmd": "status"}, timeout_s)
            return snapshot_from_json(answer["snapshot"])
        except (ProblemError, KeyError, ValueError):
            return None

    def _ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the answer; None if the connection is closed without one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            self._connect(link, time.monotonic() + timeout_s)
            link.sendall(json.dumps(command).encode() + b"\n")
            with link.makefile("rb") as file:
                line = file.readline(_LINE_BYTES)
        if not line:
            return None
        answer = parse_json(line)
        if not isinstance(answer, dict):
            raise ValueError("not an answer")
        return answer

    def _connect(self, link: socket.socket, deadline: float) -> None:
        """Connect, and retry while the supervisor has just started or has many new clients."""
        while True:
            try:
                link.connect(self._address())
                if peer_uid(link) != os.getuid():
                    raise PermissionError("its socket belongs to another user")
                return
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
                supervised = lock_holder(self._run_dir.lock_path) is not None
                if not supervised or time.monotonic() > deadline:
                    if isinstance(error, BlockingIOError):  # the queue of connections is full
                        raise TimeoutError from error
                    raise
                time.sleep(0.02)

    def _address(self) -> str:
        """Return the path of the socket, which is elsewhere if that of the run is too long for it.

        The socket or link in a copied directory leads to the supervisor of the run that it was
        copied from.
        """
        path, lock = self._run_dir.socket_path, self._run_dir.lock_path
        linked = path.is_symlink()
        if lock_was_copied(lock) or (linked and lock_holder(lock) is None):
            raise FileNotFoundError
        return os.readlink(path) if linked else str(path)

    def _problem(self, sentence: str) -> Problem:
        return Problem(where=self._run_dir.id, what=sentence)


def _failure_text(error: Exception) -> str:
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return "it has no supervisor."
    if isinstance(error, TimeoutError):
        return "its supervisor does not answer."
    return f"its supervisor cannot be reached ({error})."
