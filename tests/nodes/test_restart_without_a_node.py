"""A restart of a run on two nodes of which one is gone, or cannot be reached for a while."""

from __future__ import annotations

import contextlib
from typing import Any

import psutil
import pytest

from ltui.training.lifecycle.restart_policy import read_restart_history
from ltui.training.nodes.messages import NODE_GONE_VARIABLE
from ltui.training.state.run_snapshot import NodeState, RunState
from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from tests.live_processes import wait_until_gone
from tests.nodes.run_of_machines import cut, kill, start_run
from tests.nodes.two_homes import TwoHomes
from tests.nodes.two_machines import Machines
from tests.waiting import wait_for


def test_fewer_nodes_need_restarts(two_homes: TwoHomes) -> None:
    words = ("--set", "trainer.num_nodes=2", "--address", "127.0.0.1", "--allow-fewer-nodes")
    refused = two_homes.head("run", "quickstart", *words, check=2).stderr
    assert refused.startswith("--allow-fewer-nodes: the run is not restarted")
    assert "--restarts 3" in refused


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_continues_without_a_node_that_is_gone(
    two_homes: TwoHomes,
) -> None:
    head = two_homes.head
    head.environment |= {NODE_GONE_VARIABLE: "5", "LTUI_RESTART_DELAY_S": "0"}
    two_homes.run(
        "trainer.max_epochs=2000",
        "data.init_args.loader=torch",
        words=("--restarts", "2", "--allow-fewer-nodes"),
    )
    head.wait_for_step(20)
    head("checkpoint", "last")
    saved = head.wait(lambda s: s["checkpoints"])["checkpoints"][0]["global_step"]
    for process in two_homes.agent.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()

    def continues(snapshot: dict[str, Any]) -> bool:
        return bool(snapshot["attempt"] == 2 and (snapshot["global_step"] or 0) > saved + 5)

    snapshot = head.wait(continues)
    assert snapshot["world_size"] == 1
    assert [rank["rank"] for rank in snapshot["ranks"]] == [0]
    assert [node["node"] for node in snapshot["nodes"]] == [0]
    run_dir = find_run(head.home, "last")
    with RunStore(run_dir) as store:
        texts = {event.kind: event.text for event in store.events()}
    assert "without node 1 from step" in texts["attempt"]
    assert "it was saved by 2 ranks and continues with 1" in texts["note"]
    nodes = run_dir.read_spec().nodes
    assert nodes is not None
    assert nodes.left_out == (1,)

    head("stop", "last")
    head.wait(lambda s: s["state"] == "stopped")
    wait_until_gone(two_homes.processes)
    two_homes.resume()
    resumed = head.wait(lambda s: s["attempt"] == 3 and len(s["ranks"]) == 2, seconds=240)
    assert resumed["world_size"] == 2
    head("stop", "last", "--kill")
    wait_until_gone(two_homes.processes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_restart_waits_for_a_machine_that_cannot_be_reached(two_machines: Machines) -> None:
    run = start_run(two_machines, env={"LTUI_RESTART_DELAY_S": "0"}, words=("--restarts", "2"))
    run.ltui("checkpoint", run.run_dir.id)
    with cut(two_machines, two_machines[1]):
        run.wait_for_node(NodeState.UNREACHABLE)
        kill(run.rank_pid(0))
        waiting = wait_for(
            run.snapshot, wanted=lambda s: "restart 1 of 2 waits" in (s.detail or "")
        )
        assert waiting.state is RunState.QUEUED
        assert "machine-1 does not answer" in (waiting.detail or "")
        assert read_restart_history(run.run_dir).done == 0
    wait_for(run.snapshot, wanted=lambda s: s.attempt == 2 and len(s.ranks) == 2, seconds=200)
    run.wait_for_steps()
    assert run.snapshot().attempt == 2
    run.stop()
