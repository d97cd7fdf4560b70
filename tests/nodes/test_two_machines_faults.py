"""A run on two machines of which a process or a whole machine is frozen or killed."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from ltui.training.lifecycle.run_processes import engine_exit
from ltui.training.nodes.messages import HEAD_LOST_VARIABLE, NODE_GONE_VARIABLE
from ltui.training.state.run_snapshot import LIVE, NodeState, RunState
from ltui.training.state.verdicts import VerdictKind
from tests.nodes.run_of_machines import MachinesRun, kill, start_run
from tests.nodes.two_machines import Machines
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LOST_S = 20
"""Seconds of silence after which a machine counts as lost in these tests."""
ENVIRONMENT = {NODE_GONE_VARIABLE: str(LOST_S), HEAD_LOST_VARIABLE: str(LOST_S)}


def wait_for_verdict(run: MachinesRun, kind: VerdictKind) -> str:
    """Wait for a verdict about machine 1. Return its cause."""
    began_s = time.monotonic()
    verdict = wait_for(
        lambda: next((v for v in run.verdicts() if v.kind == kind), None), seconds=60
    )
    assert verdict is not None
    assert verdict.nodes == (1,)
    print(f"{kind} after {time.monotonic() - began_s:.1f} s: {verdict.cause}")
    return verdict.cause


def test_a_frozen_agent_is_told_apart_and_training_continues(two_machines: Machines) -> None:
    run = start_run(two_machines)
    agent = run.supervisor_pid(1)
    kill(agent, number=signal.SIGSTOP)
    run.wait_for_node(NodeState.FROZEN)
    assert "its agent does not run" in wait_for_verdict(run, VerdictKind.AGENT_FROZEN)
    assert "its agent does not answer for" in run.show()
    first = run.snapshot().global_step or 0
    wait_for(lambda: (run.snapshot().global_step or 0) > first + 5)
    kill(agent, number=signal.SIGCONT)
    run.wait_for_node(NodeState.CONNECTED)
    wait_for(run.verdicts, wanted=lambda verdicts: not verdicts)
    run.stop()
    for rank in range(2):
        steps = run.recorded_steps(rank)
        assert steps == set(range(1, max(steps) + 1))


def test_an_agent_that_is_killed_with_its_shim_ends_the_run(two_machines: Machines) -> None:
    run = start_run(two_machines)
    kill(run.shim_pid(1), run.supervisor_pid(1))
    run.wait_for_node(NodeState.AGENT_DEAD)
    assert "its agent has ended" in wait_for_verdict(run, VerdictKind.AGENT_KILLED)
    run.wait_until_empty(1)
    ended = run.wait_for_end()
    print(ended.detail)
    assert ended.state is RunState.CRASHED
    assert "machine-1 answers, but its agent has ended" in (ended.detail or "")
    assert ended.exit_code
    run.wait_until_all_are_empty()


def test_the_head_is_killed_during_a_stop(two_machines: Machines) -> None:
    run = start_run(two_machines)
    said: list[str] = []
    request = threading.Thread(
        target=lambda: said.append(run.ltui("stop", run.run_dir.id, code=None)), daemon=True
    )
    request.start()
    head = run.supervisor_pid(0)
    wait_for(
        lambda: run.snapshot().state,
        wanted=lambda state: state not in (RunState.RUNNING, RunState.STARTING),
        period_s=0.01,
    )
    kill(head)
    ended = run.wait_for_end()
    request.join(120)
    print(said, ended.detail)
    assert ended.state is RunState.STOPPED
    assert "checkpoint verified" in (ended.detail or "")
    first, second = run.rank_steps()
    assert first == second
    run.wait_until_all_are_empty()


@pytest.mark.parametrize("request_word", [None, "stop", "pause"])
def test_a_machine_that_is_gone_ends_the_run_and_leaves_nothing(
    two_machines: Machines, request_word: str | None
) -> None:
    run = start_run(two_machines, env=ENVIRONMENT)
    two_machines.cut(two_machines[1])
    two_machines[1].kill_all()
    began_s = time.monotonic()
    if request_word is not None:
        threading.Thread(
            target=lambda: run.ltui(request_word, run.run_dir.id, code=None), daemon=True
        ).start()
    ended = run.wait_for_end()
    print(f"ended after {time.monotonic() - began_s:.1f} s: {ended.detail}")
    assert ended.state is RunState.CRASHED
    assert "machine-1 is gone (no answer from 10.77.0.2 for" in (ended.detail or "")
    run.wait_until_empty(0)
    assert "machine-1 is gone" in run.show()


def test_an_agent_ends_its_ranks_when_the_machine_of_the_head_is_gone(
    two_machines: Machines,
) -> None:
    run = start_run(two_machines, env=ENVIRONMENT)
    two_machines.cut(two_machines[0])
    two_machines[0].kill_all()
    began_s = time.monotonic()
    run.wait_until_empty(1, seconds=180)
    print(f"ended after {time.monotonic() - began_s:.1f} s")
    left = run.agent_dir()
    assert "GLOBAL_RANK: 1" in left.rank_log_path(1, 1).read_text()
    assert engine_exit(left, 1) is not None
    assert list(left.queue_dir(1).glob("rank-00001.queue"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_machine(two_machines: Machines, rank: int) -> None:
    run = start_run(two_machines)
    kill(run.rank_pid(rank))
    began_s = time.monotonic()
    ended = run.wait_for_end()
    print(f"ended after {time.monotonic() - began_s:.1f} s: {ended.detail}")
    assert ended.state is RunState.CRASHED
    detail = ended.detail or ""
    assert detail.startswith(f"rank {rank} on machine-{rank} was killed by SIGKILL")
    assert f"the error of rank {1 - rank} on machine-{1 - rank} followed from that" in detail
    assert ended.exit_code == 1
    run.wait_until_all_are_empty()
    for number in range(2):
        log = run.run_dir.rank_log_path(1, number)
        assert f"GLOBAL_RANK: {number}" in log.read_text()


_RAISING = """
from ltui.training.models.digits import DigitsCNN


class Raising(DigitsCNN):
    def training_step(self, batch):
        if self.global_rank == 1 and self.global_step == 20:
            raise ValueError("the label 77 of sample 3 is no digit")
        return super().training_step(batch)
"""


def test_an_exception_on_the_other_machine_is_the_last_line(two_machines: Machines) -> None:
    for machine in two_machines:
        (machine.folder / "raising.py").write_text(_RAISING)
    run = start_run(two_machines, "model.class_path=raising.Raising", wait=False)
    began_s = time.monotonic()
    ended = run.wait_for_end(300)
    print(f"ended after {time.monotonic() - began_s:.1f} s: {ended.detail}")
    detail = ended.detail or ""
    assert detail.startswith("rank 1 on machine-1")
    assert "ValueError: the label 77 of sample 3 is no digit" in detail
    assert ended.state not in LIVE
    assert ended.exit_code == 1
    assert "the label 77 of sample 3" in run.run_dir.rank_log_path(1, 1).read_text()
    assert "the label 77 of sample 3" in run.ltui("logs", run.run_dir.id, "--rank", "1")
    run.wait_until_all_are_empty()
