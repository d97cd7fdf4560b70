"""Tests of ``judge`` with evidence that was recorded in runs with real faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.diagnosis.collective_positions import find_unfinished_collective
from ltui.training.diagnosis.evidence import Collective, Diagnosis, Evidence, Frame, RankEvidence
from ltui.training.json_codec import from_json, to_json
from ltui.training.shared.record_types import Phase
from ltui.training.state.run_snapshot import Limit, RankSnapshot, RankState
from ltui.training.supervise.health_monitor import build_diagnosis, diagnosis_headline
from tests.app.frames import snapshot
from tests.diagnosis.machines import (
    ALL_REDUCE,
    evidence_of,
    frozen,
    process,
    stack,
    with_each,
    with_rank,
)
from tests.diagnosis.recordings import FOLDER, judged, load
from tests.required import required

CASES = (
    ("data_sleep", "frozen", (1,), ("dataset code", "injections.py:", "FROZEN", "all_reduce #")),
    ("data_gil", "gil_held", (1,), ("GIL is held by a C call", "injections.py:")),
    ("data_lock", "frozen", (1,), ("futex wait", "FROZEN", "injections.py:")),
    ("worker_sleep", "worker_frozen", (1,), ("DataLoader worker", "injections.py:", "FROZEN")),
    ("worker_stop", "worker_stopped", (1,), ("DataLoader worker", "stopped")),
    ("rank0_barrier", "mismatch", (0,), ("barrier", "mismatch at #", "injections.py:")),
    ("log_rank0", "mismatch", (0,), ("mismatch", "train_zoo.py:")),
    ("mismatch_shape", "mismatch", (1,), ("size mismatch",)),
    ("unused_params", "unused_parameters", (1,), ("no gradient all_reduce",)),
    ("call_sites", "mismatch", (0,), ("injections.py:", "line")),
)


@pytest.mark.parametrize(("name", "kind", "culprits", "words"), CASES)
def test_the_culprit_and_the_cause_are_reported(
    name: str, kind: str, culprits: tuple[int, ...], words: tuple[str, ...]
) -> None:
    evidence = load(name)
    judgement = judged(evidence, later_s=4.0)
    (verdict,) = judgement.verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == (kind, "stalled", culprits)
    text = f"{verdict.cause} {verdict.place}"
    assert [word for word in words if word not in text] == []
    assert set(verdict.waiting) == set(evidence.ranks) - set(culprits)
    assert all(judgement.states[r] is RankState.STALLED for r in culprits)
    assert all(judgement.states[r] is RankState.WAITING for r in verdict.waiting)
    assert verdict.remedy
    json.dumps(to_json(verdict))


@pytest.mark.parametrize(
    ("share", "still_s", "batches", "quiet_s", "reported_s"),
    [
        (None, 5.0, 20, 0.1, 4.0),
        # On a crowded machine.
        (0.9, 1.0, 20, 6.0, 7.0),
        (0.25, 1.0, 20, 8.5, 9.5),
        (0.1, 1.0, 20, 23.5, 24.5),
        # In the first steps.
        (None, 1.0, 2, 20.0, 31.0),
        (None, 1.0, 0, 20.0, 31.0),
    ],
)
def test_a_busy_rank_has_a_longer_budget_than_a_frozen_one(
    share: float | None, still_s: float, batches: int, quiet_s: float, reported_s: float
) -> None:
    evidence = with_each(load("data_spin"), still_s=still_s)
    if share is not None:
        crowded = {"cpu_share": share, "run_delay_share": 0.95 - share, "state": "R"}
        own = replace(required(evidence.ranks[1].process), **crowded)
        evidence = with_rank(evidence, 1, process=own)
    assert not judged(evidence, later_s=quiet_s, batches=batches).verdicts
    (verdict,) = judged(evidence, later_s=reported_s, batches=batches).verdicts
    assert (verdict.kind, verdict.culprits) == ("busy", (1,))


def test_a_rank_that_gets_no_processor_at_all_is_not_frozen() -> None:
    starved = process(state="R", interval_s=3.0)
    assert starved.starved
    assert not starved.frozen
    (verdict,) = judged(with_rank(load("data_sleep"), 1, process=starved), later_s=8.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("slow_rank", "slow", (1,))
    assert "waits for a processor 100 % of the time" in verdict.cause
    assert "fewer processes" in str(verdict.remedy)


def test_within_the_budget_a_frozen_rank_is_only_suspected() -> None:
    judgement = judged(with_each(load("data_sleep"), still_s=3.0), later_s=0.1)
    assert judgement.verdicts == ()
    assert judgement.suspects == {0, 1, 2}


def test_a_mismatch_needs_no_budget_but_ranks_that_have_not_moved_since() -> None:
    (verdict,) = judged(with_each(load("rank0_barrier"), still_s=2.3), later_s=0.1).verdicts
    assert verdict.kind == "mismatch"
    assert judged(with_each(load("rank0_barrier"), still_s=-1.0), later_s=2.0).verdicts == ()


def test_two_ranks_with_two_reasons_get_two_verdicts() -> None:
    one, other = load("data_sleep"), load("worker_stop")
    second = replace(other.ranks[1], rank=2, collectives=one.ranks[1].collectives,
                     last_enqueued=one.ranks[1].last_enqueued)  # fmt: skip
    both = replace(one, ranks={**one.ranks, 2: second})
    verdicts = judged(with_each(both, still_s=5.0)).verdicts
    assert {(v.kind, v.culprits) for v in verdicts} == {("frozen", (1,)), ("worker_stopped", (2,))}


def test_the_culprit_is_found_without_stacks_and_recorder() -> None:
    nothing: dict[str, Any] = {
        "stacks": (),
        "earlier_stacks": (),
        "collectives": (),
        "last_enqueued": {},
    }
    (verdict,) = judged(with_each(load("data_sleep"), **nothing), later_s=8.0).verdicts
    assert verdict.culprits == (1,)
    assert "fetch data" in verdict.cause


def test_a_slow_write_of_a_checkpoint_is_slow_and_not_stalled() -> None:
    saving = _saving(switches=400, cpu=0.1, written=200_000_000)
    assert not judged(with_each(saving, still_s=6.0), later_s=0.1).verdicts
    (verdict,) = judged(with_each(saving, still_s=9.0), later_s=0.1).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("checkpoint", "slow", (0,))
    assert "still writing a checkpoint" in verdict.cause
    assert "MOVING" in verdict.cause


def test_uninterruptible_io_is_the_disks_fault() -> None:
    saving = _saving(switches=0, cpu=0.0, written=0, state="D", channel="percpu_rwsem_wait")
    (verdict,) = judged(with_each(saving, still_s=3.0), later_s=0.1).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("disk", "stalled", (0,))
    assert "uninterruptible I/O" in verdict.cause


def test_all_in_one_collective_is_the_transports_fault() -> None:
    evidence = load("data_sleep")
    first = evidence.ranks[0]
    ranks = {
        r: replace(first, rank=r, pid=e.pid, unacknowledged_bytes=512)
        for r, e in evidence.ranks.items()
    }
    (verdict,) = judged(replace(evidence, ranks=ranks), later_s=4.0).verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("transport", (), (0, 1, 2))
    assert "unacknowledged bytes: 1536" in verdict.cause


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("rank0_barrier", "mismatch", ("rank 0 barrier at injections.py:",)),
        ("log_rank0", "mismatch", ("rank 0 barrier at train_zoo.py:",)),
        ("unused_params", "unused_parameters", ("no gradient all_reduce",)),
    ],
)
def test_stacks_show_a_mismatch_if_nothing_is_recorded(
    name: str, kind: str, words: tuple[str, ...]
) -> None:
    unrecorded = with_each(
        load(name), collectives=(), last_enqueued={}, process=process(), still_s=1.0
    )
    assert judged(unrecorded, later_s=2.0).verdicts == ()
    (verdict,) = judged(unrecorded, later_s=4.0).verdicts
    expected = (1,) if name == "unused_params" else (0,)
    assert (verdict.kind, verdict.level, verdict.culprits) == (kind, "stalled", expected)
    assert [word for word in words if word not in verdict.cause] == []
    assert "#" not in verdict.cause


def test_one_operation_called_from_two_lines_is_a_mismatch_too() -> None:
    def waits(rank: int, line: int) -> RankEvidence:
        own = Frame(file="/home/user/train.py", line=line, function="step")
        return frozen(rank, ALL_REDUCE, own, phase="forward", batch=20, still_s=5.0, joined=True)

    def verdict_of_lines(*lines: int) -> tuple[str, tuple[int, ...]]:
        ranks = (waits(r, line) for r, line in enumerate(lines))
        (verdict,) = judged(evidence_of(*ranks, taken_s=60.0)).verdicts
        return verdict.kind, verdict.culprits

    assert verdict_of_lines(3, 3, 9) == ("mismatch", (2,))
    assert verdict_of_lines(3, 9) == ("mismatch", (0, 1))  # it is unknown which of them is wrong
    assert verdict_of_lines(3, 3, 3) == ("transport", ())


def test_a_rank_that_has_not_joined_is_blamed() -> None:
    inside = replace(ALL_REDUCE, file="/x/torch/distributed/rendezvous.py", function="rendezvous")
    outside = Frame(file="/home/user/train.py", line=7, function="prepare")
    before = {"phase": "setup", "still_s": 9.0, "joined": False}
    ranks = frozen(0, inside, **before), frozen(1, outside, **before)
    (verdict,) = judged(evidence_of(*ranks, taken_s=60.0), later_s=0.5).verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("rendezvous", (1,), (0,))
    assert "has not joined init_process_group" in verdict.cause
    assert "train.py:7" in verdict.cause


def test_some_ranks_may_be_ahead_in_a_tree_broadcast() -> None:
    """Rank 2 has completed its part of #39 and waits in #40. Rank 1 has not enqueued #39."""

    def rank(number: int, *entries: Collective) -> RankEvidence:
        return RankEvidence(
            rank=number, collectives=entries, last_enqueued={"0": entries[-1].seq}, joined=True
        )

    def entry(seq: int, op: str, *, retired: bool) -> Collective:
        return Collective(group="0", seq=seq, op=op, retired=retired)

    evidence = {
        0: rank(0, entry(39, "broadcast", retired=False)),
        1: rank(1, entry(38, "all_reduce", retired=True)),
        2: rank(2, entry(39, "broadcast", retired=True), entry(40, "all_reduce", retired=False)),
    }
    unfinished = find_unfinished_collective(evidence, {0, 1, 2})
    assert unfinished is not None
    assert (unfinished.seq, unfinished.absent, unfinished.waiting) == (39, (1,), (0,))


def test_a_diagnosis_survives_its_json() -> None:
    evidence = load("worker_sleep")
    made = build_diagnosis(snapshot(), 5.0, judged(evidence, later_s=4.0).verdicts, evidence)
    assert made.headline.startswith("stalled: rank 1")
    assert {front.rank for front in made.wavefront} == {0, 1, 2}
    assert any("worker" in who for group in made.stacks for who in group.who)
    assert Diagnosis.from_document(json.loads(json.dumps(made.to_document()))) == made


@pytest.mark.parametrize("document", [{}, {"run": 1}, {"run": "a", "ranks": 3}])
def test_another_document_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a Diagnosis"):
        Diagnosis.from_document(document)


def test_no_recording_names_a_machine() -> None:
    recordings = sorted(FOLDER.glob("*.json"))
    assert recordings
    for path in recordings:
        names = {f.file for e in from_json(Evidence, json.loads(path.read_text())).ranks.values()
                 for s in e.stacks for f in s.frames}  # fmt: skip
        assert all(n.startswith(("/env/", "/usr/", "/home/user/", "<")) for n in names), names


def _saving(
    *, switches: int, cpu: float, written: int, state: str = "S", channel: str | None = None
) -> Evidence:
    evidence = load("data_sleep")
    writes = process(
        state=state, wait_channel=channel, interval_s=0.9, cpu_share=cpu, switches=switches,
        written_bytes=written,
    )  # fmt: skip
    frames = (("/home/user/project/train.py", 3, "write"), ("/x/t.py", 1, "save_checkpoint"))
    stacks = (stack(*(Frame(file=f, line=n, function=c) for f, n, c in frames)),)
    absent, waiting = evidence.ranks[1], evidence.ranks[0]
    saves = replace(absent, rank=0, phase=Phase.CHECKPOINT.label, process=writes, stacks=stacks)
    return replace(
        evidence, ranks={0: saves, 1: replace(waiting, rank=1), 2: replace(waiting, rank=2)}
    )


def test_the_headline_of_healthy_and_unknown_runs() -> None:
    rank = RankSnapshot(rank=0, state=RankState.OK, step_s=0.0123, data_wait_share=0.08)
    assert diagnosis_headline((), (rank,)) == (
        "Healthy: rank 0 is running, 0.0123 s per step, 8 % of it waiting for data"
    )
    both = (rank, replace(rank, rank=1, step_s=0.02))
    assert diagnosis_headline((), both).startswith(
        "Healthy: ranks 0 and 1 are running; the slowest is rank 1"
    )
    # In a program without Lightning the steps of all ranks take equally long.
    assert "the slowest is rank 0" in diagnosis_headline((), both, slowest=0)
    silent = RankSnapshot(rank=0, state=RankState.RUNNING)
    assert diagnosis_headline((), (silent,)).startswith("Unknown: rank 0 sends no telemetry")
    waited_for = snapshot(ranks=both, limit=Limit(kind="rank", rank=1))
    assert build_diagnosis(waited_for, 5.0, (), None).headline.startswith("No rank stalls: ranks 0")
    assert diagnosis_headline((), ()) == "No rank has started to train yet"
