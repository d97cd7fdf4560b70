"""Accept requests to stop, pause or checkpoint a run, and carry them out.

Requests come from the control socket, from signals to the supervisor, from stop conditions that are
fulfilled, and from the stall policy. The control server's thread only validates and queues a
request. The supervisor's loop carries it out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from ltui.training.config.defaults import STOP_TIMEOUT_S
from ltui.training.state.run_event import Event
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.state.stop_conditions import StopCondition
from ltui.training.state.verdict_tracker import headline
from ltui.training.supervise import command_checks
from ltui.training.supervise.live_attempt import LiveAttempt
from ltui.training.supervise.watchdog.verdict_events import VerdictNotifier

POLICY_STOP_S = 5.0
"""Seconds within which the ranks of a stalled run must save and stop before force is used."""


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
        self.stopped_because: str | None = None
        """Set if the stall policy has stopped the run: a phrase that begins with ``stopped``."""

    # -- called by other threads and by signal handlers ----------------------------------------

    def accept(self, request: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Validate and queue a request. Return the answer to the client or a future of it.

        Called in the thread of the control server. Raises ``ValueError`` if the run cannot carry
        out the request.
        """
        attempt = self._attempt
        snapshot = attempt.snapshot
        if request.get("cmd") == "diagnose":
            if snapshot.state not in LIVE:
                raise ValueError(f"the run is {snapshot.state.value}.")
            return attempt.evidence.request_diagnosis()
        has_pulses = attempt.has_pulses()
        user_command = attempt.spec.command is not None
        multi_node = attempt.spec.nodes is not None
        command_checks.check_coordination(request, attempt.coordination_error())
        command_checks.check(
            request,
            snapshot,
            has_pulses=has_pulses,
            user_command=user_command,
            multi_node=multi_node,
        )
        answer: dict[str, Any] | Future[dict[str, Any]] = {"ok": True}
        if request["cmd"] == "stop_when":
            conditions = command_checks.stop_conditions(
                request,
                snapshot,
                has_pulses=has_pulses,
                user_command=user_command,
                multi_node=multi_node,
            )
            # Answered when the conditions are on disk, so that no confirmed condition is lost.
            answer = Future()
            request = {"cmd": "stop_when", "conditions": conditions, "answer": answer}
        self._requests.append(request)
        self._wake.set()
        return answer

    def request_stop(self, number: int) -> None:
        """Queue a stop request. Called by the handler of signal ``number``."""
        self._requests.append({"cmd": "stop", "signal": number})

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
                stops.kill(now_s)
                attempt.restarts.cancel_request()
            elif command == "stop_when":
                self._set_conditions(request["conditions"], request["answer"])
            elif command == "pause":
                stops.pause()
            elif command == "continue":
                stops.resume()
            else:
                stops.checkpoint()

    def _set_conditions(
        self, conditions: list[StopCondition] | None, answer: Future[dict[str, Any]]
    ) -> None:
        if conditions is None:
            self._attempt.pending_stops.clear()
        else:
            self._attempt.pending_stops.add(conditions)
        self._attempt.set_planned_stop()
        answer.set_result({"ok": True, "stops": [c.describe() for c in conditions or ()]})

    def stop_if_due(self, now_s: float) -> list[Event]:
        """Begin a stop if a condition is fulfilled or if ranks stop without a request."""
        attempt, stops = self._attempt, self._attempt.stops
        events: list[Event] = []
        if stops.detect_rank_stop(time.monotonic(), attempt.pulses):
            attempt.restarts.cancel_request()
        if stops.escalation is None:
            reason = attempt.pending_stops.pop_due(now_s, time.monotonic())
            if reason is not None:
                stops.stop(time.monotonic(), STOP_TIMEOUT_S, attempt.can_stop_together())
                events.append(Event(now_s, "stop_when", f"Stopping {reason}."))
        attempt.pending_stops.record_escalation(stops.escalation)
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
            refusal = self._restart(f"its stall policy ended it ({cause})", policy.restarts)
            if refusal is None:
                text = (
                    f"the stall policy restarts the run from its last good checkpoint after {cause}"
                )
                return [Event(now_s, "stall_policy", text, {"then": "restart"})]
            cause = f"{cause}; not restarted: {refusal}"
        attempt.stops.stop(time.monotonic(), POLICY_STOP_S, attempt.can_stop_together())
        self.stopped_because = f"stopped by its stall policy ({cause})"
        text = f"the stall policy stops the run after {cause}"
        return [Event(now_s, "stall_policy", text, {"then": "stop"})]

    def _restart(self, reason: str, max_restarts: int) -> str | None:
        """Kill this attempt, so that the next one starts from the last good checkpoint.

        ``max_restarts`` counts from the last time a person started the run. Return why there is no
        restart, in which case nothing was done, or None.
        """
        attempt = self._attempt
        refusal = attempt.restarts.request(reason, of=max_restarts, step=attempt.furthest_step())
        if refusal is None:
            attempt.stops.kill(time.monotonic())
        return refusal
