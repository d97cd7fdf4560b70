"""A run on two nodes is one run: it is watched, controlled and resumed from node 0."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.live_processes import wait_until_gone
from tests.nodes.two_homes import TwoHomes

LOADER = "data.init_args.loader=torch"


def start(homes: TwoHomes, *settings: str) -> dict[str, Any]:
    homes.run("trainer.max_epochs=2000", LOADER, *settings)
    return homes.head.wait_for_step(20)


def steps_of(snapshot: dict[str, Any]) -> set[int]:
    return {rank["global_step"] for rank in snapshot["ranks"]}


def test_two_nodes_pause_save_stop_and_resume_as_one_run(two_homes: TwoHomes) -> None:
    head = two_homes.head
    snapshot = start(two_homes)
    assert [rank["node"] for rank in snapshot["ranks"]] == [0, 1]
    assert [node["state"] for node in snapshot["nodes"]] == ["connected", "connected"]
    assert snapshot["nodes"][0]["name"] != snapshot["nodes"][1]["name"]

    head("pause", "last")
    paused = head.wait(lambda s: s["state"] == "paused")
    (paused_at,) = steps_of(paused)
    head("continue", "last")
    head.wait_for_step(paused_at + 5)

    head("checkpoint", "last")
    head("stop", "last")
    stopped = head.wait(lambda s: s["state"] == "stopped")
    (stopped_at,) = steps_of(stopped)
    assert [c["reason"] for c in stopped["checkpoints"]] == ["request", "stop"]
    assert all(checkpoint["ok"] for checkpoint in stopped["checkpoints"])
    wait_until_gone(two_homes.processes)
    assert not [*two_homes.agent.home.rglob("*.queue")], "the head has what is in them"

    two_homes.resume()
    head.wait_for_step(stopped_at + 20)
    head("stop", "last")
    ended = head.wait(lambda s: s["state"] == "stopped" and s["attempt"] == 2)
    wait_until_gone(two_homes.processes)
    (ended_at,) = steps_of(ended)
    # Every step of both ranks arrived on node 0, once, over the pause, the stop and the resume.
    assert two_homes.steps_on_record() == {r: list(range(1, ended_at + 1)) for r in (0, 1)}
    assert ended["history_note"] is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_stop_signal_on_another_node_stops_the_run(
    two_homes: TwoHomes, number: signal.Signals, victim: str
) -> None:
    snapshot = start(two_homes)
    if victim == "rank":
        os.kill(snapshot["ranks"][1]["pid"], number)
    else:
        agents = [
            p for p in two_homes.agent.processes() if "ltui.training.supervise.main" in p.cmdline()
        ]
        os.kill(agents[0].pid, number)
    stopped = two_homes.head.wait(lambda s: s["state"] not in ("running", "stopping"))
    assert (stopped["state"], len(steps_of(stopped))) == ("stopped", 1)
    assert stopped["checkpoints"][-1]["ok"]
    wait_until_gone(two_homes.processes)


@pytest.mark.slow
def test_killed_supervisors_are_replaced_and_lose_nothing(two_homes: TwoHomes) -> None:
    start(two_homes)
    for _ in range(3):
        for home in (two_homes.head, two_homes.agent):
            for process in home.processes():
                if "ltui.training.supervise.main" in process.cmdline():
                    process.kill()
            steps = max(steps_of(home_snapshot := two_homes.head.show()))
            assert home_snapshot["state"] in ("running", "starting")
            two_homes.head.wait_for_step(steps + 30)
    two_homes.head("stop", "last")
    stopped = two_homes.head.wait(lambda s: s["state"] == "stopped")
    (stopped_at,) = steps_of(stopped)
    wait_until_gone(two_homes.processes)
    assert two_homes.steps_on_record() == {r: list(range(1, stopped_at + 1)) for r in (0, 1)}


@pytest.mark.slow
def test_a_replaced_head_does_not_ask_a_machine_to_join_again(two_homes: TwoHomes) -> None:
    before = start(two_homes)
    agent, head = (
        next(p for p in home.processes() if "ltui.training.supervise.main" in p.cmdline())
        for home in (two_homes.agent, two_homes.head)
    )
    agent.suspend()
    try:
        head.kill()
        after = two_homes.head.wait(
            lambda s: (
                s["supervisor_pid"] not in (None, before["supervisor_pid"])
                and s["detail"]
                and "does not answer" not in s["detail"]  # it starts
            )
        )
        assert after["detail"] == "waiting for node 1 of 2 to report again"
    finally:
        agent.resume()
    two_homes.head.wait(lambda s: s["detail"] is None)
    two_homes.head("stop", "last")
    assert two_homes.head.wait(lambda s: s["state"] == "stopped")["checkpoints"][-1]["ok"]
    wait_until_gone(two_homes.processes)
