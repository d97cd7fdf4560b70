"""Orders that the ranks of a run can't carry out are refused with the reason."""

from __future__ import annotations

import pytest

from ltui.training.supervise.request_handler import check_coordination


@pytest.mark.parametrize("command", ["stop", "stop_when", "pause", "continue", "checkpoint"])
def test_ranks_that_cannot_act_together_are_not_asked_to(command: str) -> None:
    check_coordination({"cmd": command}, None)
    with pytest.raises(ValueError, match=r"its ranks cannot .*TypeError: no.*Only a kill"):
        check_coordination({"cmd": command}, "TypeError: no")


def test_a_kill_and_a_cancelled_stop_need_no_rank() -> None:
    check_coordination({"cmd": "kill"}, "TypeError: no")
    check_coordination({"cmd": "stop_when", "cancel": True}, "TypeError: no")
