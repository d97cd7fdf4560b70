"""Whether an order that came through the control socket can be carried out now.

Asked by the control server's thread of the snapshot that was published last; every refusal is a
``ValueError`` with a sentence for people.
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
"""What ranks do at a step that they agree on, and go on."""
COMMANDS = ("stop", "kill", "stop_when", *COORDINATED_COMMANDS)


def check_coordination(order: dict[str, Any], error: str | None) -> None:
    """Refuse what the ranks can't do together; ``error`` says why, None where they can."""
    command = order.get("cmd")
    if (
        error is None
        or command not in (*COORDINATED_COMMANDS, "stop", "stop_when")
        or order.get("cancel")
    ):
        return
    what = "stop with a checkpoint" if command in ("stop", "stop_when") else command
    raise ValueError(
        f"its ranks cannot {what} ({error}). Only a kill can end the run, without a new checkpoint."
    )


def check(
    order: dict[str, Any],
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
    command = order.get("cmd")
    if command not in COMMANDS:
        raise ValueError(f"there is no command {command!r}.")
    if snapshot.state not in LIVE:
        raise ValueError(f"the run is {snapshot.state.value}.")
    if command in COORDINATED_COMMANDS and multi_node:
        raise ValueError(f"ranks on several nodes cannot agree on a step at which to {command}.")
    if command in COORDINATED_COMMANDS:
        _check_steering(command, snapshot, has_pulses=has_pulses, user_command=user_command)
    if command == "stop" and not isinstance(order.get("timeout_s", 0), (int, float)):
        raise ValueError("timeout_s must be a number.")


def _check_steering(
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
    order: dict[str, Any],
    snapshot: RunSnapshot,
    *,
    has_pulses: bool,
    user_command: bool,
    multi_node: bool = False,
) -> list[StopCondition] | None:
    """What is asked for, settled by where the run is; None: cancel what stands."""
    if order.get("cancel"):
        return None
    given = order.get("conditions")
    if not isinstance(given, list) or not given:
        raise ValueError("there is no condition.")
    if snapshot.state is RunState.STOPPING:
        raise ValueError("the run is stopping.")
    begins = snapshot.state in (RunState.STARTING, RunState.QUEUED)
    silent = user_command and not has_pulses and not begins
    found = []
    for document in given:
        condition = from_document(document if isinstance(document, dict) else {})
        if multi_node and condition.kind in ("step", "epoch"):
            raise ValueError(f"ranks on several nodes cannot agree to stop {condition.describe()}.")
        if silent and condition.kind in ("step", "epoch", "metric"):
            raise ValueError(
                f"this command sends no telemetry, so ltui cannot stop it {condition.describe()}."
            )
        if (why := refusal_reason(condition, snapshot)) is not None:
            raise ValueError(why)
        found.append(
            resolve_condition(condition, snapshot.metrics, snapshot.epoch, time.monotonic())
        )
    return found
