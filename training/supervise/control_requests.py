"""Receive requests to stop, pause, checkpoint or diagnose a run, and carry them out.

The server of the control socket answers every client in a thread of its own. It holds the latest
snapshot, which the supervisor's loop publishes. Other commands are passed to a handler, which may
wait for the loop. So ``status`` and ``ping`` never wait for it.

Requests come from the control socket, from signals to the supervisor, from stop conditions that are
fulfilled, and from the stall policy. A thread of the control server only validates and queues a
request. The supervisor's loop carries it out.
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
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import to_json
from ltui.training.process.identity import ProcessIdentity, peer_uid
from ltui.training.shared.defaults import RERUN_VARIABLE, SAMPLE_S, STOP_TIMEOUT_S
from ltui.training.state.run_snapshot import LIVE, Event, RunSnapshot, RunState
from ltui.training.state.stop_conditions import (
    StopCondition,
    from_document,
    refusal_reason,
    resolve_condition,
)
from ltui.training.state.verdicts import headline
from ltui.training.supervise.live_attempt import LiveAttempt
from ltui.training.supervise.speed.profile_watch import announce
from ltui.training.supervise.verdict_hooks import VerdictNotifier
from ltui.training.tensor_queue.control_block import Command

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

    def __init__(
        self,
        path: Path,
        link_path: Path,
        handler: Handler,
        record: Callable[[RunSnapshot], None] | None = None,
    ) -> None:
        """``link_path`` is where clients look: ``path`` itself or a symbolic link to it.

        ``record`` is called with every snapshot that is published.
        """
        self._paths = {path, link_path}
        self._handler, self._record = handler, record
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
        if self._record is not None:
            self._record(snapshot)

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


POLICY_STOP_S = 5.0
"""Seconds within which the ranks of a stalled run must save and stop before force is used."""

_Result = TypeVar("_Result")

ANSWER_S = 30.0
"""Seconds to wait for the answer to a request. No client waits longer."""

COORDINATED_COMMANDS = ("pause", "continue", "checkpoint")
"""Commands that all ranks carry out at the same step, after which the run is still live."""
COMMANDS = ("stop", "kill", "stop_when", "diagnose", "profile", "sample", *COORDINATED_COMMANDS)


def check_coordination(request: dict[str, Any], error: str | None, *, saves: bool = True) -> None:
    """Raise ``ValueError`` if the ranks cannot act together but the request needs it.

    ``error`` is the reason why they cannot, or None if they can. ``saves``: a stop saves a
    checkpoint. The program is else ended by a signal, for which the ranks need not agree.
    """
    command = request.get("cmd")
    if not saves and command == "stop":
        return
    if (
        error is None
        or command not in (*COORDINATED_COMMANDS, "stop", "stop_when")
        or request.get("cancel")
    ):
        return
    if not saves:
        action = "stop together" if command == "stop_when" else command
        raise ValueError(f"its ranks cannot {action} ({error}). It can be stopped, by a signal.")
    action = "stop with a checkpoint" if command in ("stop", "stop_when") else command
    raise ValueError(
        f"its ranks cannot {action} ({error})."
        " Only a kill can end the run, without a new checkpoint."
    )


def _result(future: Future[_Result]) -> _Result:
    """Wait for a result. Its thread occupies a place among the clients, so the wait is limited."""
    try:
        return future.result(ANSWER_S)
    except FutureTimeoutError:
        raise ValueError("its supervisor does not answer.") from None


def _owner(spec: RunSpec) -> ProcessIdentity | None:
    """Return the process that waits for a run that executes steps again; None for any other run."""
    try:
        return ProcessIdentity(*json.loads(spec.env[RERUN_VARIABLE])["owner"])
    except (LookupError, TypeError, ValueError):
        return None


class RequestHandler:
    """The requests of one attempt."""

    def __init__(
        self, attempt: LiveAttempt, notifier: VerdictNotifier, wake: threading.Event
    ) -> None:
        """``wake`` is set when a request has been queued."""
        self._attempt = attempt
        self._notifier = notifier
        self._wake = wake
        self._requests: deque[dict[str, Any]] = deque()
        self.events: list[Event] = []
        """What requests began, for the history."""
        self.stopped_because: str | None = None
        """Set if the stall policy has stopped the run: a phrase that begins with ``stopped``."""
        self._owner = _owner(attempt.spec)

    # -- called by other threads and by signal handlers ----------------------------------------

    def accept(self, request: dict[str, Any]) -> dict[str, Any]:
        """Validate and queue a request. Return the answer to the client.

        Called in a thread of the control server. Raises ``ValueError`` if the run cannot carry out
        the request.
        """
        attempt = self._attempt
        error, saves = attempt.coordination_error(), attempt.fold.saves_checkpoints
        check_coordination(request, error, saves=saves)
        self._check(request)
        command = request["cmd"]
        if command == "diagnose":
            return _result(self._attempt.evidence.rounds.request_diagnosis())
        if command == "profile":
            begun: Future[int] = Future()
            self._queue({**request, "stored": begun})
            return {"ok": True, "number": _result(begun)}
        if command == "sample":
            return attempt.samples.answer(attempt)
        if command != "stop_when":
            self._queue(request)
            return {"ok": True}
        conditions = self._stop_conditions(request)
        stored: Future[None] = Future()
        self._queue({"cmd": "stop_when", "conditions": conditions, "stored": stored})
        # Answered when the conditions are on disk, so that no confirmed condition is lost.
        _result(stored)
        return {"ok": True, "stops": [c.describe() for c in conditions or ()]}

    def request_stop(self, number: int) -> None:
        """Queue a stop request. Called by the handler of signal ``number``."""
        self._requests.append({"cmd": "stop", "signal": number})

    def _queue(self, request: dict[str, Any]) -> None:
        self._requests.append(request)
        self._wake.set()

    def _check(self, request: dict[str, Any]) -> None:
        """Raise ``ValueError`` if the run cannot carry out the request now."""
        command, snapshot = request.get("cmd"), self._attempt.snapshot
        if command not in COMMANDS:
            raise ValueError(f"there is no command {command!r}.")
        if snapshot.state not in LIVE:
            raise ValueError(f"the run is {snapshot.state.value}.")
        if command in (*COORDINATED_COMMANDS, "profile"):
            self._check_coordinated(command)
        if command == "stop" and not isinstance(request.get("timeout_s", 0), (int, float)):
            raise ValueError("timeout_s must be a number.")

    def _check_coordinated(self, command: str) -> None:
        spec, snapshot = self._attempt.spec, self._attempt.snapshot
        if not self._attempt.has_pulses():
            if spec.command is None or snapshot.state is RunState.STARTING:
                raise ValueError("the ranks have not begun to train yet.")
            raise ValueError(f"this command sends no telemetry, so ltui cannot {command} it.")
        if command == "checkpoint" and not self._attempt.fold.saves_checkpoints:
            raise ValueError("the program has not told ltui how to save a checkpoint.")
        if snapshot.state is RunState.STOPPING:
            raise ValueError("the run is stopping.")
        if snapshot.state is RunState.QUEUED:
            raise ValueError(f"the run is queued ({snapshot.detail}).")
        if command == "continue" and snapshot.state not in (RunState.PAUSED, RunState.PAUSING):
            raise ValueError(f"the run is not paused, it is {snapshot.state.value}.")
        if command == "profile" and spec.nodes is not None:
            raise ValueError("a profile of a run on several machines is not possible yet.")
        if command == "profile" and snapshot.state is not RunState.RUNNING:
            raise ValueError(f"the run is {snapshot.state.value}. Profile it while it trains.")
        if command == "pause" and snapshot.state in (RunState.PAUSED, RunState.PAUSING):
            raise ValueError(f"the run is {snapshot.state.value} already.")

    def _stop_conditions(self, request: dict[str, Any]) -> list[StopCondition] | None:
        """Return the requested stop conditions, or None if the request cancels the current ones.

        Relative conditions are resolved with the current position of the run. Raises ``ValueError``
        if a condition cannot be fulfilled.
        """
        if request.get("cancel"):
            return None
        spec, snapshot = self._attempt.spec, self._attempt.snapshot
        documents = request.get("conditions")
        if not isinstance(documents, list) or not documents:
            raise ValueError("there is no condition.")
        if snapshot.state is RunState.STOPPING:
            raise ValueError("the run is stopping.")
        starting = snapshot.state in (RunState.STARTING, RunState.QUEUED)
        no_telemetry = spec.command is not None and not self._attempt.has_pulses() and not starting
        conditions = []
        for document in documents:
            condition = from_document(document if isinstance(document, dict) else {})
            text = condition.describe()
            unseen = ("step", "epoch") if snapshot.metrics else ("step", "epoch", "metric")
            if no_telemetry and condition.kind in unseen:
                raise ValueError(f"this command sends no telemetry, so ltui cannot stop it {text}.")
            if (why := refusal_reason(condition, snapshot)) is not None:
                raise ValueError(why)
            conditions.append(
                resolve_condition(condition, snapshot.metrics, snapshot.epoch, time.monotonic())
            )
        return conditions

    # -- called by the supervisor's loop -------------------------------------------------------

    def carry_out(self) -> None:
        """Carry out all queued requests."""
        attempt, stops = self._attempt, self._attempt.stops
        now_s = time.monotonic()
        while self._requests:
            request = self._requests.popleft()
            command = request["cmd"]
            if command == "stop":
                timeout_s = float(request.get("timeout_s", STOP_TIMEOUT_S))
                stops.stop(now_s, max(0.0, timeout_s), attempt.can_stop_together())
                attempt.restarts.cancel_request()
            elif command == "kill":
                active = attempt.snapshot.verdicts
                stalled = [headline(v) for v in active if v.level == "stalled" and not v.ended]
                stops.kill(now_s, stalled[0] if stalled else "")
                attempt.restarts.cancel_request()
            elif command == "stop_when":
                stops.add_conditions(request["conditions"])
                request["stored"].set_result(None)
            elif command == "profile":
                self._begin_profile(request)
            else:
                stops.request(Command[command.upper()])

    def _begin_profile(self, request: dict[str, Any]) -> None:
        live = self._attempt
        furthest, last = live.furthest_step() or 0, live.snapshot.max_steps
        try:
            if live.samples.is_sampling:
                raise ValueError(f"its ranks are being sampled. Wait {SAMPLE_S:.0f} s.")
            order = live.limits.slowest_first(live.fold)
            profile = live.profiles.start(
                request, live.fold, order, furthest=furthest, max_steps=last
            )
        except ValueError as error:
            request["stored"].set_exception(error)
        else:
            live.fold = live.profiles.leave_out(live.fold)
            request["stored"].set_result(profile.number)
            self.events.append(announce(profile))

    def close(self) -> None:
        """Refuse the requests that are still queued, because the attempt has ended."""
        while self._requests:
            if (stored := self._requests.popleft().get("stored")) is not None:
                stored.set_exception(ValueError("the run has just ended."))

    def stop_if_due(self, now_s: float) -> list[Event]:
        """Begin a stop if a condition is fulfilled, if ranks stop without a request, or if nobody
        waits for the run any more."""
        attempt, stops = self._attempt, self._attempt.stops
        events: list[Event] = []
        if stops.detect_rank_stop(time.monotonic(), attempt.pulses):
            attempt.restarts.cancel_request()
        if stops.escalation is None:
            reason = stops.pop_due(now_s, time.monotonic())
            if reason is not None:
                stops.stop(time.monotonic(), STOP_TIMEOUT_S, attempt.can_stop_together())
                events.append(Event(now_s, "stop_when", f"Stopping {reason}."))
        if self._owner is not None and not self._owner.alive():
            self._owner = None
            stops.kill(time.monotonic())
            events.append(Event(now_s, "note", "Killed, because `ltui rerun` has ended."))
        stops.record()
        return events

    def apply_stall_policy(self, now_s: float) -> list[Event]:
        """Stop or restart the run if a stall has lasted as long as the stall policy allows."""
        attempt = self._attempt
        if attempt.state not in (RunState.STARTING, RunState.RUNNING) or attempt.stops.escalation:
            return []
        verdict = self._notifier.verdict_to_act_on(time.monotonic())
        if verdict is None:
            return []
        policy, cause = attempt.spec.stall, headline(verdict)
        if policy.then == "restart":
            reason, step = f"its stall policy ended it ({cause})", attempt.furthest_step()
            refusal = attempt.restarts.request(reason, of=policy.restarts, step=step)
            if refusal is None:
                attempt.stops.kill(time.monotonic())
                text = (
                    f"the stall policy restarts the run from its last good checkpoint after {cause}"
                )
                return [Event(now_s, "stall_policy", text, {"then": "restart"})]
            cause = f"{cause}; not restarted: {refusal}"
        attempt.stops.stop(time.monotonic(), POLICY_STOP_S, attempt.can_stop_together())
        self.stopped_because = f"stopped by its stall policy ({cause})"
        text = f"the stall policy stops the run after {cause}"
        return [Event(now_s, "stall_policy", text, {"then": "stop"})]
