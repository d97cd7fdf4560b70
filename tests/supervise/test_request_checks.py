"""Orders that the ranks of a run can't carry out are refused with the reason."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.supervise import control_requests
from ltui.training.supervise.control_requests import RequestHandler, check_coordination


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
        fold=FoldState(),
        has_pulses=lambda: False,
    )
    requests = RequestHandler(attempt, Mock(), threading.Event())
    with pytest.raises(ValueError, match=why):
        requests.accept({"cmd": "pause"})


@pytest.mark.parametrize("request_", [{"cmd": "diagnose"}, {"cmd": "stop_when", "cancel": True}])
def test_a_request_without_an_answer_is_given_up(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_requests, "ANSWER_S", 0.01)
    attempt: Any = SimpleNamespace(
        snapshot=RunSnapshot(id="a", name="a", state=RunState.RUNNING),
        spec=SimpleNamespace(nodes=None, command=None),
        evidence=SimpleNamespace(rounds=SimpleNamespace(request_diagnosis=Future)),
        coordination_error=lambda: None,
        fold=FoldState(),
    )
    requests = RequestHandler(attempt, Mock(), threading.Event())
    with pytest.raises(ValueError, match="its supervisor does not answer"):
        requests.accept(request_)


def test_a_program_without_checkpoints_is_stopped_although_its_ranks_cannot_agree() -> None:
    check_coordination({"cmd": "stop"}, "no DDP", saves=False)
    for command in ("pause", "stop_when"):
        with pytest.raises(ValueError, match=r"\(no DDP\)\. It can be stopped, by a signal"):
            check_coordination({"cmd": command}, "no DDP", saves=False)
