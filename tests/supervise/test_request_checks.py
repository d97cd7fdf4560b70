"""Orders that the ranks of a run can't carry out are refused with the reason."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.supervise.request_handler import RequestHandler, check_coordination


@pytest.mark.parametrize("command", ["stop", "stop_when", "pause", "continue", "checkpoint"])
def test_ranks_that_cannot_act_together_are_not_asked_to(command: str) -> None:
    check_coordination({"cmd": command}, None)
    with pytest.raises(ValueError, match=r"its ranks cannot .*TypeError: no.*Only a kill"):
        check_coordination({"cmd": command}, "TypeError: no")


def test_a_kill_and_a_cancelled_stop_need_no_rank() -> None:
    check_coordination({"cmd": "kill"}, "TypeError: no")
    check_coordination({"cmd": "stop_when", "cancel": True}, "TypeError: no")


@pytest.mark.parametrize(
    ("state", "command", "why"),
    [
        (RunState.STARTING, ("sh",), "the ranks have not begun to train yet"),
        (RunState.RUNNING, ("sh",), "this command sends no telemetry, so ltui cannot pause it"),
        (RunState.RUNNING, None, "the ranks have not begun to train yet"),
        (RunState.FINISHED, ("sh",), "the run is finished"),
    ],
)
def test_ranks_without_a_pulse_are_not_paused(
    state: RunState, command: tuple[str, ...] | None, why: str
) -> None:
    attempt: Any = SimpleNamespace(
        snapshot=RunSnapshot(id="a", name="a", state=state),
        spec=SimpleNamespace(nodes=None, command=command),
        coordination_error=lambda: None,
        has_pulses=lambda: False,
    )
    requests = RequestHandler(attempt, Mock(), threading.Event())
    with pytest.raises(ValueError, match=why):
        requests.accept({"cmd": "pause"})
