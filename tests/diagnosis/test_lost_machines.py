"""Tests of ``judge`` in runs on several machines of which one does not answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import Evidence
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import Death, HealthHistory
from ltui.training.shared.record_types import Outcome, Phase, PulseState, RecordKind
from ltui.training.state.record_fold import fold
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState, RankState
from tests.diagnosis.machines import at, machine, trained, two_machines
from tests.diagnosis.recordings import load
from tests.state.records import SECOND, labelled, pulse


def _moving(now_s: float, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> list[PulseState]:
    return [pulse(r, Phase.FORWARD, now_s - 0.1, batch=20) for r in ranks]


def _waiting_for_b(since_s: float, seen_s: float) -> list[PulseState]:
    """Ranks of machine a wait since ``since_s``; those of b were last seen at ``seen_s``."""
    return [
        *(pulse(r, Phase.BACKWARD, since_s, batch=21) for r in (0, 1)),
        *(pulse(r, Phase.FETCH, seen_s, batch=20) for r in (2, 3)),
    ]


def _all_wait(ranks: int) -> Evidence:
    """Return evidence of ranks that all wait in one collective."""
    recorded = load("data_sleep")
    waits = recorded.ranks[0]
    return replace(recorded, ranks={r: replace(waits, rank=r, pid=200 + r) for r in range(ranks)})


def _pulses_of(evidence: Evidence, changed_s: float) -> list[PulseState]:
    """Return pulses of the recorded processes, in the backward pass since ``changed_s``."""
    ranks = evidence.ranks.items()
    return [pulse(r, Phase.BACKWARD, changed_s, batch=20, pid=e.pid or 0) for r, e in ranks]


def _kinds(judgement: Judgement) -> list[tuple[str, str]]:
    return [(v.kind, v.level) for v in judgement.verdicts]


@pytest.mark.parametrize(
    ("state", "kind", "age_s", "words"),
    [
        (NodeState.UNREACHABLE, "node_unreachable", 7.5, "the link is cut or it is down"),
        (NodeState.SILENT, "node_unreachable", 9.0, "does not answer (no report for 9 s)"),
        (NodeState.AGENT_DEAD, "agent_killed", 4.0, "answers, but its agent has ended"),
        (NodeState.FROZEN, "agent_frozen", 4.0, "answers, but its agent does not run"),
    ],
)
def test_a_machine_that_does_not_report_is_named_with_the_reason(
    state: NodeState, kind: str, age_s: float, words: str
) -> None:
    judgement = at(
        30.0, _moving(30.0, (0, 1)) + _moving(30 - age_s, (2, 3)), two_machines(age_s, state)
    )
    (verdict,) = judgement.verdicts
    assert (verdict.kind, verdict.level) == (kind, "warning")
    assert (verdict.nodes, verdict.culprits, verdict.waiting) == ((1,), (), ())
    assert words in verdict.cause
    assert verdict.cause.startswith("machine b ")
    assert verdict.cause.endswith("ranks 2 and 3 on b cannot be observed")
    assert verdict.began == pytest.approx(1030.0 - age_s)
    assert verdict.remedy
    assert judgement.states == {
        0: RankState.OK, 1: RankState.OK, 2: RankState.UNKNOWN, 3: RankState.UNKNOWN,
    }  # fmt: skip


def test_ranks_that_wait_for_a_machine_blame_it_and_not_its_ranks() -> None:
    judgement = at(20.0, _waiting_for_b(11.0, 10.9), two_machines(9.0, NodeState.UNREACHABLE))
    (verdict,) = judgement.verdicts
    assert (verdict.kind, verdict.level) == ("node_unreachable", "stalled")
    assert (verdict.nodes, verdict.culprits, verdict.waiting) == ((1,), (), (0, 1))
    assert verdict.cause == (
        "ranks 0 and 1 on a wait for machine b, which does not answer (no report for 9 s): the link"
        " is cut or it is down; ranks 2 and 3 on b cannot be observed"
    )
    assert judgement.states[0] is RankState.WAITING
    assert judgement.states[2] is RankState.UNKNOWN


def test_the_collective_in_which_ranks_wait_is_named() -> None:
    evidence = _all_wait(2)
    now_s = evidence.taken_ns / SECOND + 9.0
    waiting = _waiting_for_b(now_s - 12, now_s - 10)
    pulses = [dataclasses.replace(p, pid=200 + p.rank) for p in waiting]
    lost = two_machines(10.0, NodeState.UNREACHABLE)
    (verdict,) = at(now_s, pulses, lost, evidence=evidence).verdicts
    assert verdict.kind == "node_unreachable", "not the transport, although no seen rank is missing"
    assert "ranks 0 and 1 on a wait in all_reduce #" in verdict.cause


def test_a_rank_that_is_seen_to_be_stuck_is_blamed_although_another_machine_is_lost() -> None:
    recorded = load("data_sleep")
    now_s = recorded.taken_ns / SECOND + 4.0
    evidence = replace(recorded, ranks={0: recorded.ranks[0], 1: recorded.ranks[1]})
    pulses = [
        pulse(r, phase, now_s - 9, batch=20, pid=recorded.ranks[r].pid or 0)
        for r, phase in ((0, Phase.BACKWARD), (1, Phase.FETCH))
    ]
    pulses += _moving(now_s - 9, (2, 3))
    lost = two_machines(9.0, NodeState.UNREACHABLE)
    judgement = at(now_s, pulses, lost, evidence=evidence)
    assert _kinds(judgement) == [("frozen", "stalled"), ("node_unreachable", "warning")]
    assert judgement.verdicts[0].culprits == (1,)
    assert judgement.verdicts[0].cause.startswith("rank 1 on a is stuck")


def _cut(restored_s: float, recovered_s: float) -> Iterator[tuple[float, Judgement]]:
    """Yield times and judgements. The link is cut at 10 s, and comes back at ``restored_s``.

    The connections of the ranks have recovered at ``recovered_s``.
    """
    history, now_s = HealthHistory(), 10.0
    while now_s < restored_s + 20.0:
        now_s += 0.25
        age_s = now_s - 10.0 if now_s < restored_s else 0.2
        state = NodeState.SILENT if age_s > 2.0 else NodeState.CONNECTED
        state = NodeState.UNREACHABLE if age_s > 4.0 else state
        pulses = _waiting_for_b(10.0, 9.9) if now_s < recovered_s else _moving(now_s)
        judgement = at(now_s, pulses, two_machines(age_s, state), history=history)
        history = judgement.history
        yield now_s, judgement


def test_a_cut_is_named_within_ten_seconds_and_ends_with_new_budgets() -> None:
    judgements = dict(_cut(40.0, 43.0))
    assert [v.ended for v in judgements[40.0].ended] == [1040.0]
    seen = [(now_s, v.kind, v.level) for now_s, j in judgements.items() for v in j.verdicts]
    assert {kind for _, kind, _ in seen} == {"node_unreachable"}
    first_s, last_s = seen[0][0], seen[-1][0]
    assert first_s - 10.0 <= 10.0
    assert last_s < 40.0
    assert ("node_unreachable", "stalled") in {s[1:] for s in seen}


def test_a_cut_of_five_seconds_gives_no_verdict() -> None:
    assert [j.verdicts for _, j in _cut(15.5, 18.0) if j.verdicts] == []


def test_old_pulses_of_a_late_report_are_no_stall() -> None:
    """A report is late by two seconds: only what it shows counts."""
    pulses = [*_moving(20.0, (0, 1)), *(pulse(r, Phase.FORWARD, 15.0, batch=19) for r in (2, 3))]
    assert at(20.0, pulses, two_machines(2.0)).verdicts == ()
    (verdict,) = at(22.0, pulses, two_machines(0.2)).verdicts
    assert verdict.culprits == (2, 3)
    assert "ranks 2 and 3 on b have made no progress" in verdict.cause


def test_evidence_that_is_newer_than_the_pulse_of_a_rank_is_not_used() -> None:
    recorded = load("rank0_barrier")
    now_s = recorded.taken_ns / SECOND + 0.3
    pulses = _pulses_of(recorded, now_s - 4.0)
    nodes = (machine(0, (0,)), machine(1, (1, 2), 1.5))
    assert at(now_s, pulses, nodes, evidence=recorded).verdicts == ()
    in_time = (nodes[0], replace(nodes[1], link_age_s=0.1))
    (verdict,) = at(now_s, pulses, in_time, evidence=recorded).verdicts
    assert (verdict.kind, verdict.culprits) == ("mismatch", (0,))
    assert verdict.cause.startswith("rank 0 on a called")


def test_a_machine_that_is_gone_counts_its_ranks_as_lost() -> None:
    nodes = two_machines(600.0, NodeState.GONE)
    judgement = at(620.0, _waiting_for_b(20.0, 20.0), nodes)
    (verdict,) = judgement.verdicts
    assert (verdict.kind, verdict.level) == ("node_gone", "dead")
    assert (verdict.nodes, verdict.culprits, verdict.waiting) == ((1,), (2, 3), (0, 1))
    assert "machine b, which is gone (no report for 600 s)" in verdict.cause
    assert judgement.states[2] is RankState.DEAD


def test_the_end_of_ranks_that_lost_their_peers_is_blamed_on_the_machine() -> None:
    state, pulses = trained(), {}
    for rank in (0, 1):
        event = {"kind": "exception", "type": "RuntimeError", "t": 1019.0,
                 "message": "Connection closed by peer [10.0.0.2]:4000"}  # fmt: skip
        state = fold(state, rank, [labelled(RecordKind.EVENT, event)])
        pulses[rank] = pulse(rank, Phase.EXCEPTION, 19.0, outcome=Outcome.RAISED)
    pulses |= {r: pulse(r, Phase.FORWARD, 16.0, batch=20) for r in (2, 3)}
    soon = at(20.0, pulses, two_machines(4.0, NodeState.SILENT), fold=state)
    assert soon.verdicts == (), "the cause may still be reported"
    (verdict,) = at(23.0, pulses, two_machines(7.0, NodeState.UNREACHABLE), fold=state).verdicts
    assert (verdict.kind, verdict.level, verdict.nodes) == ("node_unreachable", "dead", (1,))
    assert verdict.cause.endswith("ranks 0 and 1 on a lost the connection and ended with an error")
    dead = {"dead": frozenset({2}), "deaths": {2: Death(signal="SIGKILL")}}
    (verdict,) = at(23.0, pulses, two_machines(0.2), fold=state, **dead).verdicts
    assert (verdict.kind, verdict.culprits) == ("killed", (2,))
    assert verdict.cause.startswith("rank 2 on b was killed by SIGKILL")


def test_machines_behind_one_switch_get_one_verdict() -> None:
    def nodes(lost: int) -> tuple[NodeSnapshot, ...]:
        more: dict[str, Any] = {"age_s": 8.0, "state": NodeState.UNREACHABLE}
        return (
            machine(0, (0, 1)),
            *(machine(n, (n + 1,), **(more if n <= lost else {})) for n in (1, 2, 3)),
        )

    pulses = _moving(30.0, (0, 1, 2, 3, 4))
    first = at(30.0, pulses, nodes(1), fold=trained(5))
    second = at(30.2, _moving(30.2, (0, 1, 2, 3, 4)), nodes(3), fold=trained(5),
                history=first.history)  # fmt: skip
    (verdict,) = second.verdicts
    assert verdict.nodes == (1, 2, 3)
    assert verdict.cause.startswith("machines b, c and d do not answer")
    assert verdict.began == first.verdicts[0].began
    assert second.ended == ()


def test_a_paused_run_names_a_lost_machine_without_a_stall() -> None:
    pulses = [pulse(r, Phase.PAUSED, 1.0) for r in range(4)]
    judgement = at(900.0, pulses, two_machines(12.0, NodeState.UNREACHABLE))
    assert _kinds(judgement) == [("node_unreachable", "warning")]
    assert set(judgement.states.values()) == {RankState.PAUSED}


def test_stopped_processes_on_several_machines_are_named_with_their_machine() -> None:
    pulses = [pulse(r, Phase.BACKWARD, 10.0, batch=20) for r in range(4)]
    (verdict,) = at(12.0, pulses, two_machines(), stopped_pids={1: 71, 2: 72}).verdicts
    assert "rank 1 on a and rank 2 on b are stopped" in verdict.cause
    assert verdict.remedy == "To continue it: kill -CONT 71 on a; kill -CONT 72 on b"


def test_evidence_of_one_machine_is_enough_for_a_verdict_on_it() -> None:
    """Nothing is concluded from evidence that lacks the ranks of a machine that answers."""
    recorded = load("data_sleep")
    now_s = recorded.taken_ns / SECOND + 1.0
    evidence = replace(recorded, ranks={0: recorded.ranks[0]})
    pulses = _pulses_of(recorded, now_s - 4.5)
    nodes = (machine(0, (0,)), machine(1, (1, 2)))
    assert at(now_s, pulses, nodes, evidence=evidence).verdicts == ()


@pytest.mark.parametrize(
    ("restored_s", "level"), [(5.0, "warning"), (39.0, "warning"), (41.0, "stalled")]
)
def test_ranks_that_wait_after_a_cut_until_tcp_sends_again(restored_s: float, level: str) -> None:
    evidence = _all_wait(4)
    now_s = evidence.taken_ns / SECOND + 4.0
    pulses = _pulses_of(evidence, now_s - 30)
    nodes = two_machines(cut_s=30.0, restored_s=restored_s)
    (verdict,) = at(now_s, pulses, nodes, evidence=evidence).verdicts
    assert (verdict.kind, verdict.level) == ("transport", level)
    if level == "warning":
        assert "the link to machine b was cut for 30 s and is back" in verdict.cause
        assert "within about 40 s" in (verdict.remedy or "")
