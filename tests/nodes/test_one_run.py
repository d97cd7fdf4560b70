"""A run on two nodes is one run: it is watched, controlled and resumed from node 0."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from ltui.training.lifecycle.restart_policy import read_restart_history
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.nodes.messages import NODE_GONE_VARIABLE
from ltui.training.state.run_snapshot import NodeState, RunState
from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from tests.live_processes import wait_until_gone
from tests.nodes.addresses import free_port_pair
from tests.nodes.run_of_machines import cut, kill, start_run
from tests.nodes.simulated_nodes import simulated_run
from tests.nodes.two_homes import TwoHomes
from tests.nodes.two_machines import Machines
from tests.required import required
from tests.system.conftest import Ltui
from tests.waiting import wait_for


def start(homes: TwoHomes, *settings: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
    loader = "data.init_args.loader=torch"
    homes.run("trainer.max_epochs=2000", loader, *settings, words=words)
    return homes.head.wait_for_step(20)


def steps_of(snapshot: dict[str, Any]) -> set[int]:
    return {rank["global_step"] for rank in snapshot["ranks"]}


def supervisors(home: Ltui) -> list[psutil.Process]:
    """Return the supervisor or the agent in a home."""
    return [p for p in home.processes() if "ltui.training.supervise.main" in p.cmdline()]


def has_stopped(homes: TwoHomes, attempt: int = 1) -> dict[str, Any]:
    """Wait until the run has stopped with a good checkpoint, and nothing of it runs any more."""
    live = ("running", "stopping")
    ended = homes.head.wait(lambda s: s["state"] not in live and s["attempt"] == attempt)
    assert (ended["state"], len(steps_of(ended))) == ("stopped", 1)
    assert ended["checkpoints"][-1]["ok"]
    wait_until_gone(homes.processes)
    return ended


_LATE = """
import pathlib
import time

import lightning.pytorch as pl


class Late(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        while trainer.global_rank == 1 and pathlib.Path("late").exists():
            time.sleep(0.1)

    # Ranks act there, too.
    on_validation_batch_end = on_train_epoch_end = on_train_batch_end
"""


@pytest.mark.timeout(600)
def test_two_nodes_pause_save_stop_and_resume_as_one_run(two_homes: TwoHomes) -> None:
    """While a request waits for a rank, the run says for which one and on which machine."""
    head = two_homes.head
    (head.cwd / "late.py").write_text(_LATE)
    is_late = head.cwd / "late"
    snapshot = start(two_homes, 'trainer.callbacks=[{"class_path": "late.Late"}]')
    assert [rank["node"] for rank in snapshot["ranks"]] == [0, 1]
    assert [node["state"] for node in snapshot["nodes"]] == ["connected", "connected"]
    assert snapshot["nodes"][0]["name"] != snapshot["nodes"][1]["name"]
    missing = f"rank 1 on {snapshot['nodes'][1]['name']} is missing"

    def detail(request: str) -> str:
        """Return the detail of the run while a request waits for rank 1."""
        is_late.touch()
        with ThreadPoolExecutor() as pool:
            command = pool.submit(head, request, "last")
            found = head.wait(lambda s: missing in (s["detail"] or ""))
            is_late.unlink()
            command.result()
        return str(found["detail"])

    assert detail("pause") == f"pausing: {missing}"
    (paused_at,) = steps_of(head.wait(lambda s: s["state"] == "paused"))
    head("continue", "last")
    head.wait_for_step(paused_at + 5)

    assert detail("checkpoint") == f"saving a checkpoint: {missing}"
    head.wait(lambda s: s["checkpoints"] and s["detail"] is None)
    assert detail("stop").endswith(f"; {missing}")
    stopped = has_stopped(two_homes)
    (stopped_at,) = steps_of(stopped)
    assert [c["reason"] for c in stopped["checkpoints"]] == ["request", "stop"]
    assert all(checkpoint["ok"] for checkpoint in stopped["checkpoints"])
    assert not [*two_homes.agent.home.rglob("*.queue")], "the head has what is in them"

    two_homes.resume()
    head.wait_for_step(stopped_at + 20)
    # A machine that joins a later attempt never starts the engine of another one.
    begun = [path.name for path in two_homes.agent.home.glob("nodes/*/engine/*.start.json")]
    assert begun == ["2.start.json"]
    head("stop", "last")
    ended = has_stopped(two_homes, attempt=2)
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
    agent = supervisors(two_homes.agent)[0].pid
    os.kill(snapshot["ranks"][1]["pid"] if victim == "rank" else agent, number)
    has_stopped(two_homes)


@pytest.mark.slow
def test_killed_supervisors_are_replaced_and_lose_nothing(two_homes: TwoHomes) -> None:
    start(two_homes)
    for _ in range(3):
        for home in (two_homes.head, two_homes.agent):
            for process in supervisors(home):
                process.kill()
            snapshot = two_homes.head.show()
            assert snapshot["state"] in ("running", "starting")
            two_homes.head.wait_for_step(max(steps_of(snapshot)) + 30)
    two_homes.head("stop", "last")
    (stopped_at,) = steps_of(has_stopped(two_homes))
    assert two_homes.steps_on_record() == {r: list(range(1, stopped_at + 1)) for r in (0, 1)}


@pytest.mark.slow
def test_a_replaced_head_does_not_ask_a_machine_to_join_again(two_homes: TwoHomes) -> None:
    before = start(two_homes)
    agent, head = (supervisors(home)[0] for home in (two_homes.agent, two_homes.head))
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
    has_stopped(two_homes)


def test_all_ranks_of_many_simulated_machines_agree_on_a_stop(private_home: Path) -> None:
    with simulated_run(private_home, agents=6, ranks_per_agent=4, processes=2, step_s=0.2) as run:
        snapshot = resolve_snapshot(run.run_dir)
        assert [node.node for node in snapshot.nodes] == list(range(7))
        assert {rank.node for rank in snapshot.ranks} == set(range(7))
        assert len(snapshot.ranks) == 25
        assert {node.state for node in snapshot.nodes} <= {NodeState.CONNECTED, NodeState.SILENT}
        run.stop()
    ended = resolve_snapshot(run.run_dir)
    assert ended.state is RunState.STOPPED
    steps = {rank.global_step for rank in ended.ranks}
    assert len(steps) == 1, "the ranks have stopped at different steps"


# -- a node that is gone, or cannot be reached for a while -----------------------------------------


def test_fewer_nodes_need_restarts(two_homes: TwoHomes) -> None:
    words = ("--set", "trainer.num_nodes=2", "--address", "127.0.0.1", "--allow-fewer-nodes")
    refused = two_homes.head("run", "quickstart", *words, check=2).stderr
    assert refused.startswith("--allow-fewer-nodes: the run is not restarted")
    assert "--restarts 3" in refused


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_continues_without_a_node_that_is_gone(two_homes: TwoHomes) -> None:
    head = two_homes.head
    head.environment |= {NODE_GONE_VARIABLE: "5", "LTUI_RESTART_DELAY_S": "0"}
    start(two_homes, words=("--restarts", "2", "--allow-fewer-nodes"))
    head("checkpoint", "last")
    saved = head.wait(lambda s: s["checkpoints"])["checkpoints"][0]["global_step"]
    for process in two_homes.agent.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
    snapshot = head.wait(lambda s: s["attempt"] == 2 and (s["global_step"] or 0) > saved + 5)
    assert snapshot["world_size"] == 1
    assert [rank["rank"] for rank in snapshot["ranks"]] == [0]
    assert [node["node"] for node in snapshot["nodes"]] == [0]
    run_dir = find_run(head.home, "last")
    with RunStore(run_dir) as store:
        texts = {event.kind: event.text for event in store.events()}
    assert "without node 1 from step" in texts["attempt"]
    assert "it was saved by 2 ranks and continues with 1" in texts["note"]
    assert required(run_dir.read_spec().nodes).left_out == (1,)

    head("stop", "last")
    has_stopped(two_homes, attempt=2)
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


# -- what is left on a machine ---------------------------------------------------------------------

LINES = 60_000
"""Lines of 60 bytes that each node writes just before it ends: more than a few reports carry."""

PROGRAM = f"""
import os, pathlib, sys, time
done = pathlib.Path("done")
if os.environ["NODE_RANK"] == "1":
    for number in range({LINES}):
        print(f"{{number:059d}}")
    sys.stdout.flush()
    done.touch()
    sys.exit("fail" in sys.argv)
while not done.exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_whole_log_travels_and_only_evidence_stays(two_homes: TwoHomes, fails: bool) -> None:
    argv = ("--num-nodes", "2", "--detach", "--address", "127.0.0.1", "--port", free_port_pair())
    words = ["fail"] if fails else []
    two_homes.head("exec", *argv, "--", sys.executable, "-c", PROGRAM, *words)
    run_dir = find_run(two_homes.head.home, "last")
    two_homes.join(follow=True)
    log: Path = run_dir.logs_dir(1) / "engine-1.log"
    lines = wait_for(lambda: log.read_text().splitlines(), wanted=lambda x: len(x) >= LINES)
    assert lines[LINES - 1] == f"{LINES - 1:059d}"
    folder = two_homes.agent.home / "nodes"
    assert [path.name for path in folder.iterdir()] == ([f"{run_dir.id}-1"] if fails else [])
