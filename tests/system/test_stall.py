"""A rank that stands still is named while it does, and forgotten when it moves again."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.system.conftest import Ltui


def stops(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts about a stopped process."""
    return [v for v in snapshot["verdicts"] if v["kind"] == "stopped"]


@pytest.mark.timeout(500)
def test_a_stopped_rank_is_named_and_the_verdict_ends(
    ltui: Ltui, slow_quickstart: list[str]
) -> None:
    ltui(*slow_quickstart)
    pid = ltui.wait_for_step(20)["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        # On a crowded machine others may come before and after it.
        stalled = ltui.wait(lambda s: stops(s) and s["ranks"][0]["state"] == "waiting")
    finally:
        os.kill(pid, signal.SIGCONT)
    (verdict,) = stops(stalled)
    assert (verdict["level"], verdict["culprits"], verdict["waiting"]) == ("stalled", [1], [0])
    assert "rank 1 is stopped" in verdict["cause"]
    assert [rank["state"] for rank in stalled["ranks"]] == ["waiting", "stalled"]
    ltui.wait_for_step(stalled["global_step"] + 5)
    ltui.wait(lambda s: not stops(s))
    ltui("stop", "last", "--kill")
    ltui.wait_until_alone()
