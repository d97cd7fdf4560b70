"""Tests of evidence that agents of several machines send, and of one judgement on all of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import (
    Evidence,
    HostEvidence,
    RankEvidence,
    merge_evidence,
    shorten_for_link,
)
from ltui.training.diagnosis.judge_input import Death
from ltui.training.json_codec import from_json, to_json
from ltui.training.shared.record_types import Phase, PulseState
from ltui.training.supervise.health_monitor import build_diagnosis
from tests.app.frames import snapshot
from tests.diagnosis.machines import at, machine, trained
from tests.diagnosis.recordings import FOLDER, load, pulses_of
from tests.required import required
from tests.state.records import SECOND

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
_fields = st.none() | st.dictionaries(st.text(max_size=3), _json, max_size=2)
_ranks = st.builds(RankEvidence, exception=_fields, gpu=_fields)
_evidence = st.builds(Evidence, ranks=st.dictionaries(st.integers(0, 9), _ranks, max_size=3))


def _sent(value: Any) -> Any:
    """Return the document of a value as it arrives at node 0."""
    return json.loads(json.dumps(to_json(value), allow_nan=False))


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(_evidence)
def test_any_evidence_arrives_as_it_was_sent(evidence: Evidence) -> None:
    document = _sent(evidence)
    assert _sent(Evidence.from_document(document)) == document


@given(st.builds(HostEvidence), st.builds(Death))
def test_hosts_and_deaths_arrive_as_they_were_sent(host: HostEvidence, death: Death) -> None:
    assert _sent(from_json(HostEvidence, _sent(host), tolerant=True)) == _sent(host)
    assert from_json(Death, _sent(death)) == death


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.json")))
def test_recorded_evidence_arrives_unchanged(name: str) -> None:
    evidence = load(name)
    assert Evidence.from_document(_sent(evidence)) == evidence


@pytest.mark.parametrize(
    "document",
    [{}, [], {"taken_at": 1.0}, {"taken_at": 1, "taken_ns": 1, "ranks": {"x": {}}}],
)
def test_another_document_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="Evidence"):
        Evidence.from_document(document)


def _split(evidence: Evidence, offsets_ns: dict[int, int]) -> dict[int, Evidence]:
    """Return the evidence of three machines with a rank each, on their own clocks."""
    return {
        node: replace(
            evidence,
            taken_ns=evidence.taken_ns - offsets_ns.get(node, 0),
            ranks={node: evidence.ranks[node]},
            host=HostEvidence(host=f"host{node}"),
            missing=("no permission to ptrace",),
        )
        for node in range(3)
    }


NODES = tuple(machine(n, (n,)) for n in range(3))


def test_times_are_moved_to_the_clock_of_node_0() -> None:
    evidence, offsets_ns = load("data_sleep"), {1: 7 * SECOND, 2: -3 * SECOND}
    parts = _split(evidence, offsets_ns)
    merged = merge_evidence(parts, offsets_ns, {1: -90.0}, {1: "b"})
    assert merged.taken_ns == evidence.taken_ns
    assert {r: (e.node, e.taken_ns) for r, e in merged.ranks.items()} == {
        r: (r, evidence.taken_ns) for r in range(3)
    }
    assert {n: h.host for n, h in merged.hosts.items()} == {0: "host0", 1: "host1", 2: "host2"}
    assert merged.missing == ("no permission to ptrace", "b: no permission to ptrace")
    assert Evidence.from_document(_sent(merged)) == merged
    newest = merge_evidence({1: parts[1]}, {}, {1: -90.0})
    assert newest.taken_at == evidence.taken_at - 90.0
    with pytest.raises(ValueError, match="no evidence"):
        merge_evidence({})


def test_the_newer_observation_of_a_rank_counts() -> None:
    """A rank that landed on another machine after a restart."""
    evidence = load("data_sleep")
    old = replace(evidence, taken_ns=evidence.taken_ns - SECOND)
    merged = merge_evidence({0: evidence, 1: old})
    assert {e.node for e in merged.ranks.values()} == {0}


@pytest.mark.parametrize(
    ("name", "kind", "culprit"),
    [
        ("data_sleep", "frozen", 1),
        ("data_gil", "gil_held", 1),
        ("worker_stop", "worker_stopped", 1),
        ("mismatch_shape", "mismatch", 1),
        ("unused_params", "unused_parameters", 1),
        ("call_sites", "mismatch", 0),
        ("rank0_barrier", "mismatch", 0),
    ],
)
def test_a_fault_on_another_machine_is_found_from_the_merged_evidence(
    name: str, kind: str, culprit: int
) -> None:
    evidence = load(name)
    parts = _split(evidence, {1: 5 * SECOND, 2: 9 * SECOND})
    parts = {n: Evidence.from_document(_sent(shorten_for_link(p))) for n, p in parts.items()}
    merged = merge_evidence(parts, {1: 5 * SECOND, 2: 9 * SECOND})
    pulses: dict[int, PulseState | None] = {
        r: dataclasses.replace(p, changed_ns=p.changed_ns - 2 * SECOND)
        for r, p in pulses_of(evidence).items()
        if p is not None
    }
    now_s = evidence.taken_ns / SECOND + 4.0
    (verdict,) = at(now_s, pulses, NODES, fold=trained(3), evidence=merged).verdicts
    assert (verdict.kind, verdict.culprits) == (kind, (culprit,))
    assert verdict.cause.startswith(f"rank {culprit} on {'abc'[culprit]} ")
    assert f" on {'abc'[2]}" in verdict.cause
    if kind == "worker_stopped":
        assert str(verdict.remedy).endswith(" on b")


def test_an_old_part_does_not_hide_that_a_rank_has_moved() -> None:
    """Machine c answered the round before; its rank has moved since, so nothing is concluded."""
    evidence = load("data_sleep")
    parts = _split(evidence, {})
    parts[2] = replace(parts[2], taken_ns=evidence.taken_ns - 20 * SECOND)
    merged = merge_evidence(parts)
    pulses = pulses_of(evidence)
    pulses[2] = dataclasses.replace(
        required(pulses[2]), changed_ns=evidence.taken_ns - 5 * SECOND, phase=Phase.BACKWARD
    )
    now_s = evidence.taken_ns / SECOND + 1.0
    judgement = at(now_s, pulses, NODES, fold=trained(3), evidence=merged)
    assert judgement.verdicts == ()
    assert 2 in judgement.suspects


def test_a_diagnosis_names_the_machine_of_every_rank() -> None:
    evidence = load("worker_stop")
    merged = merge_evidence(_split(evidence, {}))
    made = build_diagnosis(snapshot(nodes=NODES), 5.0, (), merged)
    who = [name for group in made.stacks for name in group.who]
    assert {"rank 0 on a", "rank 1 on b", "rank 2 on c"} <= {*who}
    assert any(name.startswith("worker ") and name.endswith(" of rank 1 on b") for name in who)


def test_what_is_sent_is_short_and_keeps_what_waits() -> None:
    evidence = load("call_sites")
    first = evidence.ranks[0]
    waits = replace(first.collectives[0], seq=1, retired=False)
    frames = first.stacks[0].frames * 3
    many = tuple(replace(waits, seq=i, retired=True, frames=frames) for i in range(2, 200))
    other = replace(first.stacks[0], main=False, frames=frames)
    groups, stacks = {"0": (0, 1, 2)}, (other,) * 20 + first.stacks
    long = replace(first, collectives=(waits, *many), groups=groups, stacks=stacks)
    sent = shorten_for_link(replace(evidence, ranks={0: long, 1: replace(long, rank=1)}))
    assert [e.seq for e in sent.ranks[0].collectives] == [1, *range(136, 200)]
    assert {e.frames for e in sent.ranks[0].collectives} == {()}
    assert {e.call_site for e in sent.ranks[0].collectives} == {waits.call_site}
    assert sent.ranks[0].main_stack == first.main_stack
    assert len(sent.ranks[0].stacks) == 8
    assert [e.groups for e in sent.ranks.values()] == [{"0": (0, 1, 2)}, {"0": ()}]
