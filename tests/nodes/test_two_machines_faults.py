"""A run on two machines of which a process or a whole machine is frozen or killed: the right
machine, rank and cause."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from ltui.training.diagnosis.evidence import Diagnosis
from ltui.training.lifecycle.run_processes import engine_exit
from ltui.training.nodes.messages import HEAD_LOST_VARIABLE, NODE_GONE_VARIABLE
from ltui.training.state.run_snapshot import LIVE, NodeState, RunState
from ltui.training.state.verdicts import VerdictKind
from tests.faults.catalogue import BY_ID
from tests.ltui_command import answer
from tests.nodes.machine_faults import first_verdict, kill_agent, started, watch
from tests.nodes.run_of_machines import MachinesRun, kill, start_run
from tests.nodes.two_machines import Machines, ltui_on
from tests.required import required
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LOST_S = 20
"""Seconds of silence after which a machine counts as lost in these tests."""
ENVIRONMENT = {NODE_GONE_VARIABLE: str(LOST_S), HEAD_LOST_VARIABLE: str(LOST_S)}


def cause_of_verdict(run: MachinesRun, kind: VerdictKind) -> str:
    """Wait for a verdict about machine 1. Return its cause."""
    found = wait_for(lambda: [v for v in run.verdicts() if v.kind == kind], seconds=60)
    assert found[0].nodes == (1,)
    return found[0].cause


def test_a_frozen_agent_is_told_apart_and_training_continues(two_machines: Machines) -> None:
    run = start_run(two_machines)
    agent = run.supervisor_pid(1)
    kill(agent, number=signal.SIGSTOP)
    run.wait_for_node(NodeState.FROZEN)
    assert "its agent does not run" in cause_of_verdict(run, VerdictKind.AGENT_FROZEN)
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


def test_a_killed_agent_whose_shim_cannot_replace_it_does_not_stop_training(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        before = run.until_training()
        kill_agent(run)
        verdict = first_verdict(run, "agent_killed")
        assert (verdict.level, verdict.nodes, verdict.culprits) == ("warning", (1,), ())
        assert verdict.cause.startswith("machine machine-1 answers, but its agent")
        step = (before.global_step or 0) + 20
        run.until(lambda s: (s.global_step or 0) >= step)


def test_an_agent_that_is_killed_with_its_shim_ends_the_run(two_machines: Machines) -> None:
    run = start_run(two_machines)
    kill(run.shim_pid(1), run.supervisor_pid(1))
    run.wait_for_node(NodeState.AGENT_DEAD)
    assert "its agent has ended" in cause_of_verdict(run, VerdictKind.AGENT_KILLED)
    run.wait_until_empty(1)
    ended = run.wait_for_end()
    assert ended.state is RunState.CRASHED
    assert "machine-1 answers, but its agent has ended" in (ended.detail or "")
    assert ended.exit_code
    run.wait_until_all_are_empty()


def test_the_head_is_killed_during_a_stop(two_machines: Machines) -> None:
    run = start_run(two_machines)
    request = threading.Thread(
        target=lambda: run.ltui("stop", run.run_dir.id, code=None), daemon=True
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
    if request_word is not None:
        threading.Thread(
            target=lambda: run.ltui(request_word, run.run_dir.id, code=None), daemon=True
        ).start()
    ended = run.wait_for_end()
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
    run.wait_until_empty(1, seconds=180)
    left = run.agent_dir()
    assert "GLOBAL_RANK: 1" in left.rank_log_path(1, 1).read_text()
    assert engine_exit(left, 1) is not None
    assert list(left.queue_dir(1).glob("rank-00001.queue"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_machine(two_machines: Machines, rank: int) -> None:
    run = start_run(two_machines)
    kill(run.rank_pid(rank))
    ended = run.wait_for_end()
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
    ended = run.wait_for_end(300)
    detail = ended.detail or ""
    assert detail.startswith("rank 1 on machine-1")
    assert "ValueError: the label 77 of sample 3 is no digit" in detail
    assert ended.state not in LIVE
    assert ended.exit_code == 1
    assert "the label 77 of sample 3" in run.run_dir.rank_log_path(1, 1).read_text()
    assert "the label 77 of sample 3" in run.ltui("logs", run.run_dir.id, "--rank", "1")
    run.wait_until_all_are_empty()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("data_sleep", "frozen", "rank 1 on machine-1 is stuck in fetch data"),
        ("sigkill", "killed", "rank 1 on machine-1 was killed by SIGKILL"),
        ("rank0_barrier", "mismatch", "rank 0 on machine-0 called a different collective"),
    ],
)
def test_a_fault_of_a_rank_has_one_verdict(
    fault: str, kind: str, words: str, tmp_path: Path
) -> None:
    with started(tmp_path, BY_ID[fault]) as run:
        run.wait_for_injection()
        assert words in first_verdict(run, kind).cause
        assert {v.kind for v in watch(run, 4.0)} == {kind}
        if fault != "data_sleep":
            return
        done = ltui_on(run.machines[0], "diagnose", "last", "--json", code=0)
        diagnosis = Diagnosis.from_document(answer(done.stdout))
        evidence = required(diagnosis.evidence)
        assert {r: e.node for r, e in evidence.ranks.items()} == {0: 0, 1: 1}
        assert {n: h.host for n, h in evidence.hosts.items()} == {0: "machine-0", 1: "machine-1"}
        who = [name for stack in diagnosis.stacks for name in stack.who]
        assert {"rank 0 on machine-0", "rank 1 on machine-1"} <= {*who}
