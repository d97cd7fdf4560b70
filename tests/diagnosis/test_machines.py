"""Tests of ``judge`` about machines that answer: names, slowness, clocks and memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import HealthHistory
from ltui.training.diagnosis.verdict_words import (
    machines_text,
    rank_machines,
    ranks_text,
    waiting_text,
)
from ltui.training.shared.record_types import Phase
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import NodeSnapshot, Verdict
from tests.diagnosis.machines import at, machine, trained, two_machines
from tests.state.records import SECOND, pulse, steps

HOT = Verdict(kind="gpu_thermal", level="warning", culprits=(3,), cause="GPU b:1: 93 °C")
EIGHT = {r: "ab"[r // 8] for r in range(16)}


@pytest.mark.parametrize(
    ("ranks", "machines", "text"),
    [
        ((3,), {3: "b"}, "rank 3 on b"),
        ((0, 1), {0: "a", 1: "a"}, "ranks 0 and 1 on a"),
        ((0, 9), EIGHT, "rank 0 on a and rank 9 on b"),
        ((0, 1, 9), {**EIGHT, 9: "c"}, "ranks 0 and 1 on a and rank 9 on c"),
        (tuple(range(8, 16)), EIGHT, "the 8 ranks on b"),
        (tuple(range(8, 15)), EIGHT, "ranks 8, 9, 10 and 4 others on b"),
        (tuple(range(16)), EIGHT, "ranks 0, 1, 2 and 13 others on 2 machines"),
        ((0, 1, 3), {}, "ranks 0, 1 and 3"),
        (tuple(range(64)), {}, "ranks 0, 1, 2 and 61 others"),
    ],
)
def test_ranks_are_named_with_their_machine(
    ranks: tuple[int, ...], machines: dict[int, str], text: str
) -> None:
    assert ranks_text(ranks, machines) == text


def test_one_machine_is_not_named() -> None:
    assert rank_machines((machine(0, (0, 1)),)) == {}
    assert machines_text(["b"]) == "machine b"
    assert machines_text([f"n{i}" for i in range(9)]) == "machines n0, n1, n2 and 6 others"
    assert waiting_text((0, 2), "x", {0: "a", 2: "b"}) == "; rank 0 on a and rank 2 on b wait in x"


def _worked(*own_s: float, step_s: float = 0.4, count: int = 60, **parts: Any) -> FoldState:
    """Return a fold in which rank i computes ``own_s[i]`` seconds in each step."""
    state = FoldState()
    for rank, own in enumerate(own_s):
        rows = steps(count, step_s, **{"fetch_s": 0.0, "forward_s": own, **parts})
        state = fold(state, rank, rows)
    return state


def _slowness(
    state: FoldState,
    nodes: tuple[NodeSnapshot, ...],
    history: HealthHistory | None = None,
    **more: Any,
) -> Judgement:
    end = state.ranks[0].totals
    assert end is not None
    now_s = end.t_ns / SECOND + 0.1
    since = HealthHistory(straggling_since_ns=round((now_s - 3) * SECOND))
    pulses = [pulse(r, Phase.FORWARD, now_s - 0.1, batch=60) for r in state.ranks]
    return at(now_s, pulses, nodes, fold=state, history=history or since, **more)


def test_a_machine_whose_ranks_are_all_slower_is_named() -> None:
    (verdict,) = _slowness(_worked(0.1, 0.11, 0.37, 0.35), two_machines()).verdicts
    assert (verdict.kind, verdict.level) == ("slow_node", "slow")
    assert (verdict.nodes, verdict.culprits, verdict.waiting) == ((1,), (2, 3), (0, 1))
    assert verdict.cause.startswith(
        "machine b is slower than the others: each of its 2 ranks works"
    )
    assert "0.36 s in a step, mostly longer in forward, a rank elsewhere 0.11 s" in verdict.cause
    assert "its computation is slow" in verdict.cause


@pytest.mark.parametrize(
    ("own_s", "sizes", "found"),
    [
        ((0.1, 0.11, 0.37, 0.12), (2, 2), ("straggler", (2,), ())),
        ((0.1, 0.1, 0.37), (2, 1), ("straggler", (2,), ())),
        # Machines that differ little, or alike.
        ((0.1, 0.1, 0.1, 0.1), (2, 2), None),
        ((0.37, 0.36, 0.37, 0.36), (2, 2), None),
        ((0.1, 0.1, 0.13, 0.14), (2, 2), None),
        ((0.1, 0.1, 0.37, 0.36, 0.37, 0.36), (2, 2, 2), None),
    ],
)
def test_one_slow_rank_or_a_small_difference_is_not_the_machines_fault(
    own_s: tuple[float, ...], sizes: tuple[int, ...], found: tuple[Any, ...] | None
) -> None:
    ranks = iter(range(len(own_s)))
    nodes = tuple(machine(n, itertools.islice(ranks, size)) for n, size in enumerate(sizes))
    verdicts = _slowness(_worked(*own_s), nodes, evidence_expected=False).verdicts
    assert [(v.kind, v.culprits, v.nodes) for v in verdicts] == ([] if found is None else [found])
    assert all(v.cause.startswith("rank 2 on b is the STRAGGLER") for v in verdicts)


def test_steps_of_seconds_are_long_enough_for_a_slow_machine() -> None:
    state = _worked(0.3, 0.3, 2.7, 2.6, step_s=3.0, count=12)
    (verdict,) = _slowness(state, two_machines()).verdicts
    assert verdict.kind == "slow_node"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"hosts": {1: HostEvidence(load=30.0, cores=8)}}, "it has a load of 30 on 8 cores"),
        ({"cpu_delays": {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.6}}, "other processes use its processors"),
        ({"gpu_verdicts": (HOT,)}, "GPU b:1: 93 °C"),
    ],
)
def test_the_reason_of_a_slow_machine_is_named(more: dict[str, Any], words: str) -> None:
    (verdict,) = _slowness(_worked(0.1, 0.11, 0.37, 0.35), two_machines(), **more).verdicts
    assert verdict.kind == "slow_node"
    assert words in verdict.cause


def test_a_slow_machine_stays_reported_while_the_difference_shrinks() -> None:
    first = _slowness(_worked(0.1, 0.11, 0.37, 0.35), two_machines())
    history = replace(first.history, judged_ns=None)
    again = _slowness(_worked(0.1, 0.1, 0.2, 0.2), two_machines(), history)
    assert [v.kind for v in again.verdicts] == ["slow_node"]
    assert _slowness(_worked(0.1, 0.1, 0.2, 0.2), two_machines()).verdicts == ()
    assert _slowness(_worked(0.1, 0.1, 0.12, 0.12), two_machines(), history).verdicts == ()


def _clocks(*skews_s: float | None, heads_s: float = 0.0, start: Judgement | None = None):
    """Judge once a second with these skews of machine b; ``heads_s`` moves node 0's clock."""
    history = HealthHistory() if start is None else start.history
    begin_s = 30.0 if start is None else (start.history.judged_ns or 0) / SECOND + 1
    judgements = []
    for second, skew_s in enumerate(skews_s):
        now_s = begin_s + second
        pulses = [pulse(r, Phase.FORWARD, now_s - 0.1, batch=20) for r in range(4)]
        judgements.append(
            at(
                now_s, pulses, two_machines(clock_skew_s=skew_s), history=history,
                wall_s=1000 + now_s + heads_s,
            )
        )  # fmt: skip
        history = judgements[-1].history
    return judgements


def test_a_clock_that_is_set_is_reported_for_a_minute() -> None:
    judgements = _clocks(90.0, 90.1, None, 0.2, *[0.2] * 70)
    assert [j.verdicts for j in judgements[:3]] == [(), (), ()]
    (verdict,) = judgements[3].verdicts
    assert (verdict.kind, verdict.level, verdict.nodes) == ("clock_jump", "warning", (1,))
    assert verdict.cause.startswith("the clock of machine b jumped back by 90 s")
    lasted = [j.verdicts == (verdict,) for j in judgements[3:]]
    assert lasted.count(True) == 60
    assert lasted == sorted(lasted, reverse=True)


def test_a_constant_or_slowly_changing_skew_is_not_reported() -> None:
    for judgement in _clocks(*(90 + 0.5 * math.sin(i) for i in range(20))):
        assert judgement.verdicts == ()


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_jump_of_node_0_is_not_blamed_on_the_others(late: int) -> None:
    before = _clocks(5.0, 5.0)[-1]
    after = _clocks(*[5.0] * late, *[-55.0] * 4, heads_s=60.0, start=before)
    for judgement in after:
        (verdict,) = judgement.verdicts
        assert verdict.nodes == (0,)
        assert "the clock of machine a jumped forward by 60 s" in verdict.cause


def test_scarce_memory_is_reported_for_each_machine() -> None:
    scarce = HostEvidence(memory_available_bytes=1 << 20, memory_total_bytes=1 << 34)
    full = HostEvidence(shm_free_bytes=0, shm_total_bytes=1 << 30)
    fine = HostEvidence(memory_available_bytes=1 << 33, memory_total_bytes=1 << 34)
    pulses = [pulse(r, Phase.FORWARD, 29.9, batch=20) for r in range(4)]
    first = at(30.0, pulses, two_machines(), host=fine, hosts={0: scarce, 1: scarce})
    assert [(v.kind, v.nodes) for v in first.verdicts] == [("memory", (0,)), ("memory", (1,))]
    assert len({v.began for v in first.verdicts}) == 2, "or the history stores only one"
    assert first.verdicts[1].cause.startswith("memory on b is about to run out: 1 MB of 17.2 GB")
    after = at(30.1, pulses, two_machines(), hosts={0: full, 1: scarce}, history=first.history)
    assert [(v.kind, v.nodes) for v in after.verdicts] == [
        ("shared_memory", (0,)),
        ("memory", (1,)),
    ]
    assert after.verdicts[0].cause.startswith("shared memory on a is full")
    assert [v.nodes for v in after.ended] == [(0,)]
    (alone,) = at(30.0, pulses, host=scarce).verdicts
    assert (alone.nodes, alone.cause[:24]) == ((), "memory is about to run o")


def test_an_out_of_memory_kill_counts_only_on_the_machine_of_the_rank() -> None:
    pulses = [pulse(r, Phase.FORWARD, 29.9, batch=20) for r in range(4)]
    hosts = {0: HostEvidence(oom_kills=1), 1: HostEvidence(oom_kills=0)}
    for rank, kind in ((1, "out_of_memory"), (2, "exited")):
        (verdict,) = at(
            30.0, pulses, two_machines(), hosts=hosts, oom_kills=1, dead=frozenset({rank})
        ).verdicts
        assert (verdict.kind, verdict.culprits) == (kind, (rank,))


def test_a_whole_machine_that_others_wait_for_is_at_fault_itself() -> None:
    pulses = [
        *(pulse(r, Phase.BACKWARD, 4.0, batch=20) for r in (0, 1)),
        *(pulse(r, Phase.FETCH, 4.0, batch=20) for r in (2, 3)),
    ]
    (verdict,) = at(12.0, pulses, two_machines()).verdicts
    assert (verdict.culprits, verdict.nodes, verdict.waiting) == ((2, 3), (1,), (0, 1))
    assert verdict.cause == (
        "ranks 2 and 3 on b have made no progress in fetch data for 8 s; ranks 0 and 1 on a wait"
    )
    one_of_them = [dataclasses.replace(pulses[3], phase=Phase.BACKWARD), *pulses[:3]]
    (verdict,) = at(12.0, one_of_them, two_machines()).verdicts
    assert (verdict.culprits, verdict.nodes) == ((2,), ())
    assert trained(4).ranks.keys() == {0, 1, 2, 3}
