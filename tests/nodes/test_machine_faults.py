"""Faults of a run on two machines, in network namespaces: the right machine, rank and cause."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ltui.training.diagnosis.evidence import Diagnosis
from ltui.training.state.run_snapshot import NodeState
from tests.faults.catalogue import BY_ID
from tests.nodes.machine_faults import first_verdict, kill_agent, started, stop_agent, watch
from tests.nodes.two_machines import ltui_on
from tests.required import required

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("data_sleep", "frozen", "rank 1 on machine-1 is stuck in fetch data"),
        ("sigkill", "killed", "rank 1 on machine-1 was killed by SIGKILL"),
        ("rank0_barrier", "mismatch", "rank 0 on machine-0 called a different collective"),
    ],
)
def test_a_fault_of_a_rank(fault: str, kind: str, words: str, tmp_path: Path) -> None:
    with started(tmp_path, BY_ID[fault]) as run:
        verdict, _ = first_verdict(run, kind, run.wait_for_injection())
        assert words in verdict.cause
        assert {v.kind for v in watch(run, 4.0)} == {kind}


def test_a_diagnosis_has_evidence_of_both_machines(tmp_path: Path) -> None:
    with started(tmp_path, BY_ID["data_sleep"]) as run:
        first_verdict(run, "frozen", run.wait_for_injection())
        done = ltui_on(run.machines[0], "diagnose", "last", "--json", code=0)
        diagnosis = Diagnosis.from_document(json.loads(done.stdout))
        evidence = required(diagnosis.evidence)
        assert {r: e.node for r, e in evidence.ranks.items()} == {0: 0, 1: 1}
        assert {n: h.host for n, h in evidence.hosts.items()} == {0: "machine-0", 1: "machine-1"}
        who = [name for stack in diagnosis.stacks for name in stack.who]
        assert {"rank 0 on machine-0", "rank 1 on machine-1"} <= {*who}


@pytest.mark.parametrize(
    ("fault", "kind"), [(kill_agent, "agent_killed"), (stop_agent, "agent_frozen")]
)
def test_a_fault_of_an_agent_does_not_stop_training(fault, kind: str, tmp_path: Path) -> None:
    with started(tmp_path) as run:
        before = run.until_training()
        fault(run)
        verdict, _ = first_verdict(run, kind, time.monotonic())
        assert (verdict.level, verdict.nodes, verdict.culprits) == ("warning", (1,), ())
        assert verdict.cause.startswith("machine machine-1 answers, but its agent")
        step = (before.global_step or 0) + 20
        run.until(lambda s: (s.global_step or 0) >= step)


def test_a_cut_link_is_named_and_training_continues_when_it_is_back(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        run.until_training()
        run.machines.cut(run.machines[1])
        verdict, _ = first_verdict(run, "node_unreachable", time.monotonic(), "stalled")
        assert (verdict.nodes, verdict.culprits, verdict.waiting) == ((1,), (), (0,))
        assert "rank 0 on machine-0 waits" in verdict.cause
        run.machines.restore(run.machines[1])
        back = run.until(lambda s: s.nodes[1].state is NodeState.CONNECTED)
        step = (back.global_step or 0) + 20
        after = run.until(lambda s: all((r.global_step or 0) >= step for r in s.ranks))
        assert [v for v in after.verdicts if v.level in ("dead", "stalled")] == []
