"""Tests of ``judge`` with evidence that is missing for some ranks, and with several groups."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from ltui.training.diagnosis.collective_positions import collective_positions
from ltui.training.diagnosis.evidence import (
    Collective,
    Evidence,
    Frame,
    ProcessActivity,
    RankEvidence,
    WorkerEvidence,
)
from ltui.training.diagnosis.judge import Judgement
from ltui.training.shared.record_types import Outcome, Phase
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import Verdict
from tests.diagnosis.machines import (
    ALL_REDUCE,
    DATASET,
    at,
    evidence_of,
    frozen,
    process,
    stack,
    trained,
    with_each,
    with_rank,
)
from tests.diagnosis.recordings import judged, load
from tests.state.records import pulse


def test_any_part_of_the_evidence_may_be_missing() -> None:
    every = [c for n in range(4) for c in itertools.combinations((0, 1, 2), n)]
    for ranks, looked_at in itertools.product(every, every):
        state = trained(3)
        judgement = at(
            12,
            {r: pulse(r, Phase.FETCH, 4.0, batch=20, pid=100 + r) for r in ranks},
            fold=replace(state, ranks={r: state.ranks[r] for r in ranks}),
            silent_s={r: 20.0 for r in (0, 1, 2) if r not in ranks},
            evidence=evidence_of(*(frozen(r, DATASET) for r in looked_at)),
        )
        for verdict in judgement.verdicts:
            assert not set(verdict.culprits) & set(verdict.waiting)


def test_a_stuck_rank_is_reported_in_addition_to_a_stopped_one() -> None:
    phases = (Phase.BACKWARD, Phase.FETCH, Phase.FORWARD)
    inside = RankEvidence(rank=0, pid=100, alive=True, stacks=(stack(ALL_REDUCE, DATASET),))
    unknown = RankEvidence(rank=2, pid=102, alive=True)
    judgement = at(
        12,
        [pulse(r, phase, 4.0, batch=20, pid=100 + r) for r, phase in enumerate(phases)],
        fold=trained(3),
        stopped_pids={2: 102},
        evidence=evidence_of(inside, frozen(1, DATASET), unknown),
    )
    by_kind = {v.kind: v for v in judgement.verdicts}
    assert by_kind["stopped"].culprits == (2,)
    assert 1 not in by_kind["stopped"].waiting
    (other,) = (v for v in judgement.verdicts if v.kind != "stopped")
    assert other.culprits == (1,)
    assert "data.py:7" in other.cause


def _finished(
    of_rank_1: ProcessActivity, since_s: float, workers: tuple[WorkerEvidence, ...] = ()
) -> Judgement:
    """All have finished, and rank 1 still has a process."""
    over = Outcome.FINISHED
    pulses = {r: pulse(r, Phase.ENDED, 1.0, batch=20, pid=100 + r, outcome=over) for r in (0, 2)}
    pulses[1] = pulse(1, Phase.TEARDOWN, 1.0, batch=20, pid=101, outcome=over)
    gone = ProcessActivity(pid=100)
    evidence = evidence_of(
        *(frozen(r, process=gone, stacks=()) for r in (0, 2)),
        frozen(1, DATASET, process=of_rank_1, workers=workers),
    )
    return at(1.0 + since_s, pulses, evidence=evidence, fold=FoldState(), wall_s=1012.0)


def test_a_finished_rank_that_does_not_exit_is_reported_with_its_line() -> None:
    assert _finished(process(101), 5.0).verdicts == ()
    assert 1 in _finished(process(101), 5.0).suspects
    (verdict,) = _finished(process(101), 15.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("not_exiting", "warning", (1,))
    assert "rank 1 has finished and does not exit: it is stuck" in verdict.cause
    assert "data.py:7" in verdict.cause
    (verdict,) = _finished(process(101), 700.0).verdicts
    assert verdict.level == "stalled"


def test_a_rank_that_exports_what_was_trained_is_left_alone() -> None:
    busy = process(101, cpu_share=0.9, switches=20)
    assert _finished(busy, 300.0).verdicts == ()
    assert _finished(ProcessActivity(pid=101), 300.0).verdicts == ()
    uploads = WorkerEvidence(process=replace(busy, pid=102), loader=False)
    assert _finished(process(101), 300.0, (uploads,)).verdicts == ()
    idle = replace(uploads, process=process(102))
    assert _finished(process(101), 300.0, (idle,)).verdicts


def test_a_rank_that_only_polls_for_minutes_in_one_step_is_stalled() -> None:
    evidence = load("data_sleep")
    polling = process(evidence.ranks[1].pid or 0, switches=20)
    evidence = with_rank(evidence, 1, process=polling)
    for later_s, level in ((8.0, "slow"), (130.0, "stalled")):
        (verdict,) = judged(evidence, later_s=later_s).verdicts
        assert (verdict.level, verdict.culprits) == (level, (1,))


def _sets_up(*inner: str) -> Evidence:
    """Rank 1 computes without a pause before training, within these functions; others wait."""
    stacks = (stack(*(replace(DATASET, function=name) for name in inner)),)
    evidence = with_each(load("data_spin"), phase=Phase.SETUP.label)
    return with_rank(evidence, 1, stacks=stacks, earlier_stacks=stacks)


@pytest.mark.parametrize(
    ("within", "quiet_s", "levels"),
    [
        (("index", "setup"), 1.0, {40.0: "slow", 700.0: "stalled"}),  # 29 s in all
        # It prepares data alone, which may take longer.
        (("tokenise", "prepare_data"), 300.0, {700.0: "stalled"}),
    ],
)
def test_a_rank_that_works_before_training_has_a_longer_budget(
    within: tuple[str, ...], quiet_s: float, levels: dict[float, str]
) -> None:
    evidence = _sets_up(*within)
    assert judged(evidence, later_s=quiet_s).verdicts == ()
    for later_s, level in levels.items():
        (verdict,) = judged(evidence, later_s=later_s).verdicts
        assert (verdict.level, verdict.culprits) == (level, (1,))


@pytest.mark.parametrize(("switches", "kind"), [(40, "slow_rank"), (0, "frozen")])
def test_a_rank_that_waits_for_a_program_that_works_is_not_frozen(switches: int, kind: str) -> None:
    wait = Frame(file="/usr/lib/python3.11/subprocess.py", line=1264, function="wait")
    evidence = _sets_up("upload", "on_train_epoch_end")
    stacks = (stack(wait, *evidence.ranks[1].stacks[0].frames),)
    program = WorkerEvidence(process=process(102, name="aws", switches=switches), loader=False)
    evidence = with_rank(
        evidence, 1, stacks=stacks, earlier_stacks=stacks, process=process(101), workers=(program,)
    )
    (verdict,) = judged(evidence, later_s=5.0).verdicts
    assert (verdict.kind, verdict.culprits) == (kind, (1,))
    assert ("for process 102 (aws), which works" in verdict.cause) == (kind == "slow_rank")


def test_a_worker_that_hangs_since_its_fork_is_named_and_not_one_that_waits_for_work() -> None:
    """As seen with Python 3.11.7: the new worker has no name yet, and answers no signal."""
    queue = Frame(file="/usr/lib/python3.11/multiprocessing/queues.py", line=113, function="get")
    wait = Frame(file="/torch/utils/data/dataloader.py", line=1293, function="_try_get_data")
    idle = process(102, name="pt_data_worker", interval_s=34.0, switches=6)
    waits = WorkerEvidence(process=idle, stacks=(stack(queue),))
    hung = WorkerEvidence(process=process(103, name="python"), loader=False)
    stacks = (stack(queue, wait),)

    def verdict_with(*workers: WorkerEvidence) -> Verdict:
        evidence = with_rank(
            load("data_sleep"), 1, stacks=stacks, earlier_stacks=stacks, workers=workers,
            process=process(101, name="python"),
        )  # fmt: skip
        (verdict,) = judged(evidence, 10.0).verdicts
        return verdict

    verdict = verdict_with(waits, hung)
    assert (verdict.kind, verdict.culprits) == ("worker_frozen", (1,))
    assert "DataLoader worker 103, which hangs since it was forked" in verdict.cause
    assert "112275" in (verdict.remedy or "")
    verdict = verdict_with(waits)
    assert "DataLoader worker 102" in verdict.cause
    assert "FROZEN: 6 context switches in 34.0 s" in verdict.cause
    ran = replace(hung, process=replace(idle, pid=103, name="python"))
    cause = verdict_with(waits, ran).cause
    assert "since it was forked" not in cause, "it has run, so it may be any process"


# -- several process groups, and groups used in different orders -----------------------------------


def _in_group(
    rank: int, members: Mapping[str, tuple[int, ...]], waits_in: str | None
) -> RankEvidence:
    """Return a rank that waits in the first collective of group ``waits_in``.

    It has done nine collectives of the default group. With None it is in its dataset.
    """
    line = Frame(file="/home/user/train.py", line=10 + rank, function="training_step")
    entries = [Collective(group="0", seq=n, op="all_reduce", retired=True) for n in range(1, 10)]
    if waits_in is not None:
        entries.append(Collective(group=waits_in, seq=1, op="all_reduce", call_site=line))
    return frozen(
        rank, *((DATASET,) if waits_in is None else (ALL_REDUCE, line)), joined=True,
        groups={g: of for g, of in members.items() if rank in of},
        last_enqueued={"0": 9} | ({waits_in: 1} if waits_in is not None else {}),
        collectives=tuple(entries),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("members", "waits_in", "kind", "culprits", "waiting", "words"),
    [
        (
            {"1": (0, 1, 2), "2": (0, 1, 2)},
            ("1", "2", "1"),
            "mismatch",
            (1,),
            (0, 2),
            ("rank 1 all_reduce #1 of group 2 at train.py:11", "different orders"),
        ),
        ({"1": (0, 1), "2": (0, 1)}, ("1", "2"), "mismatch", (0, 1), (), ("it is unknown which",)),
        # A rank is missing from a group that it has never used.
        ({"1": (0, 1, 2)}, ("1", None, "1"), "frozen", (1,), (0, 2), ("data.py:7",)),
        # Rank 1 waits for rank 0 in one group, rank 0 for rank 2 in another.
        ({"1": (0, 1), "2": (0, 2)}, ("2", "1", None), "frozen", (2,), (0, 1), ()),
        # A rank that is no member is not missing.
        ({"1": (0, 1)}, ("1", "1", None), "transport", (), (0, 1), ()),
    ],
)
def test_the_rank_for_which_others_wait_in_several_groups_is_blamed(
    members: Mapping[str, tuple[int, ...]],
    waits_in: tuple[str | None, ...],
    kind: str,
    culprits: tuple[int, ...],
    waiting: tuple[int, ...],
    words: tuple[str, ...],
) -> None:
    every = {"0": tuple(range(len(waits_in))), **members}
    (verdict,) = at(
        12,
        [pulse(r, Phase.FORWARD, 4.0, batch=20, pid=100 + r) for r in every["0"]],
        fold=trained(len(waits_in)),
        evidence=evidence_of(*(_in_group(r, every, group) for r, group in enumerate(waits_in))),
    ).verdicts
    assert (verdict.kind, verdict.level) == (kind, "stalled")
    assert (verdict.culprits, verdict.waiting) == (culprits, waiting)
    assert [word for word in words if word not in verdict.cause] == []


def test_a_member_that_has_never_used_a_group_has_a_position_in_it() -> None:
    every = {"0": (0, 1, 2), "1": (0, 1, 2), "2": (0, 2)}
    close = {r: _in_group(r, every, g) for r, g in enumerate(("1", None, "1"))}
    seen = {(f.rank, f.group): f.last_enqueued for f in collective_positions(close)}
    assert {r: seen[r, "1"] for r in range(3)} == {0: 1, 1: 0, 2: 1}
    assert (0, "2") not in seen
