"""Validate requests that arrive through the control socket.

The thread of the control server calls these functions with the snapshot that was published last.
A refusal is a ``ValueError`` whose text is shown to the user.
"""

from __future__ import annotations

import time
from typing import Any

from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.state.stop_conditions import (
    StopCondition,
    from_document,
    refusal_reason,
    resolve_condition,
)

COORDINATED_COMMANDS = ("pause", "continue", "checkpoint")
"""Commands that all ranks carry out at the same step, after which the run is still live."""
COMMANDS = ("stop", "kill", "stop_when", *COORDINATED_COMMANDS)


def check_coordination(request: dict[str, Any], error: str | None) -> None:
    """Raise ``ValueError`` if the ranks cannot act together but the request needs it.

    ``error`` is the reason why they cannot, or None if they can.
    """
    command = request.get("cmd")
    if (
        error is None
        or command not in (*COORDINATED_COMMANDS, "stop", "stop_when")
        or request.get("cancel")
    ):
        return
    action = "stop with a checkpoint" if command in ("stop", "stop_when") else command
    raise ValueError(
        f"its ranks cannot {action} ({error})."
        " Only a kill can end the run, without a new checkpoint."
    )


def check(
    request: dict[str, Any],
    snapshot: RunSnapshot,
    *,
    has_pulses: bool,
    user_command: bool,
    multi_node: bool = False,
) -> None:
    """Raise ``ValueError`` if the run cannot carry out the request now.

    ``has_pulses``: at least one rank has a pulse. ``user_command``: the run is a command of the
    user (``ltui exec``). ``multi_node``: some of its ranks are on other nodes.
    """
    command = request.get("cmd")
    if command not in COMMANDS:
        raise ValueError(f"there is no command {command!r}.")
    if snapshot.state not in LIVE:
        raise ValueError(f"the run is {snapshot.state.value}.")
    if command in COORDINATED_COMMANDS and multi_node:
        raise ValueError(f"ranks on several nodes cannot agree on a step at which to {command}.")
    if command in COORDINATED_COMMANDS:
        _check_coordinated(command, snapshot, has_pulses=has_pulses, user_command=user_command)
    if command == "stop" and not isinstance(request.get("timeout_s", 0), (int, float)):
        raise ValueError("timeout_s must be a number.")


def _check_coordinated(
    command: str, snapshot: RunSnapshot, *, has_pulses: bool, user_command: bool
) -> None:
    if not has_pulses:
        if not user_command or snapshot.state is RunState.STARTING:
            raise ValueError("the ranks have not begun to train yet.")
        raise ValueError(f"this command sends no telemetry, so ltui cannot {command} it.")
    if snapshot.state is RunState.STOPPING:
        raise ValueError("the run is stopping.")
    if snapshot.state is RunState.QUEUED:
        raise ValueError(f"the run is queued ({snapshot.detail}).")
    if command == "continue" and snapshot.state not in (RunState.PAUSED, RunState.PAUSING):
        raise ValueError(f"the run is not paused, it is {snapshot.state.value}.")
    if command == "pause" and snapshot.state in (RunState.PAUSED, RunState.PAUSING):
        raise ValueError(f"the run is {snapshot.state.value} already.")


def stop_conditions(
    request: dict[str, Any],
    snapshot: RunSnapshot,
    *,
    has_pulses: bool,
    user_command: bool,
    multi_node: bool = False,
) -> list[StopCondition] | None:
    """Return the requested stop conditions, or None if the request cancels the current ones.

    Relative conditions are resolved with the current position of the run. Raises ``ValueError``
    if a condition cannot be fulfilled. The parameters are those of ``check``.
    """
    if request.get("cancel"):
        return None
    documents = request.get("conditions")
    if not isinstance(documents, list) or not documents:
        raise ValueError("there is no condition.")
    if snapshot.state is RunState.STOPPING:
        raise ValueError("the run is stopping.")
    starting = snapshot.state in (RunState.STARTING, RunState.QUEUED)
    no_telemetry = user_command and not has_pulses and not starting
    conditions = []
    for document in documents:
        condition = from_document(document if isinstance(document, dict) else {})
        if multi_node and condition.kind in ("step", "epoch"):
            raise ValueError(f"ranks on several nodes cannot agree to stop {condition.describe()}.")
        if no_telemetry and condition.kind in ("step", "epoch", "metric"):
            raise ValueError(
                f"this command sends no telemetry, so ltui cannot stop it {condition.describe()}."
            )
        if (why := refusal_reason(condition, snapshot)) is not None:
            raise ValueError(why)
        conditions.append(
            resolve_condition(condition, snapshot.metrics, snapshot.epoch, time.monotonic())
        )
    return conditions
