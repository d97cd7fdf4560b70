"""Tests of ``judge`` with evidence that is missing for some ranks."""

from __future__ import annotations

import itertools

from msgspec.structs import replace

from ltui.training.diagnosis.evidence import (
    Evidence,
    Frame,
    ProcessActivity,
    RankEvidence,
    ThreadStack,
    WorkerEvidence,
)
from ltui.training.diagnosis.judge import Judgement
from ltui.training.shared.record_types import Outcome, Phase
from ltui.training.state.record_fold import FoldState, fold
from tests.diagnosis.machines import at
from tests.diagnosis.recordings import judged, load
from tests.state.records import SECOND, pulse, steps

_OWN = Frame(file="/home/user/data.py", line=7, function="__getitem__")


def _evidence(ranks: tuple[int, ...]) -> Evidence:
    stack = ThreadStack(name="MainThread", main=True, frames=(_OWN,))
    return Evidence(
        taken_at=1010.0,
        taken_ns=10 * SECOND,
        ranks={
            r: RankEvidence(
                rank=r, pid=100 + r, alive=True, stacks=(stack,), process=_frozen(100 + r)
            )
            for r in ranks
        },
    )


def _frozen(pid: int) -> ProcessActivity:
    return ProcessActivity(pid=pid, state="S", interval_s=1.8, cpu_share=0.0, switches=0)


def _judged(ranks: tuple[int, ...], looked_at: tuple[int, ...]) -> Judgement:
    state = FoldState()
    for rank in ranks:
        state = fold(state, rank, steps(20, 0.1))
    pulses = {r: pulse(r, Phase.FETCH, 4.0, batch=20, pid=100 + r) for r in ranks}
    silent = {r: 20.0 for r in (0, 1, 2) if r not in ranks}
    return at(
        12,
        pulses,
        fold=state,
        silent_s=silent,
        evidence=_evidence(looked_at),
        evidence_expected=True,
    )


def test_any_part_of_the_evidence_may_be_missing() -> None:
    every = [c for n in range(4) for c in itertools.combinations((0, 1, 2), n)]
    for ranks, looked_at in itertools.product(every, every):
        judgement = _judged(ranks, looked_at)
        for verdict in judgement.verdicts:
            assert not set(verdict.culprits) & set(verdict.waiting)


def test_a_stuck_rank_is_reported_in_addition_to_a_stopped_one() -> None:
    state = FoldState()
    for rank in range(3):
        state = fold(state, rank, steps(20, 0.1))
    pulses = {
        0: pulse(0, Phase.BACKWARD, 4.0, batch=20, pid=100),
        1: pulse(1, Phase.FETCH, 4.0, batch=20, pid=101),
        2: pulse(2, Phase.FORWARD, 4.0, batch=20, pid=102),
    }
    judgement = at(
        12,
        pulses,
        fold=state,
        stopped_pids={2: 102},
        evidence=_with_a_wait(),
        evidence_expected=True,
    )
    by_kind = {v.kind: v for v in judgement.verdicts}
    assert by_kind["stopped"].culprits == (2,)
    assert 1 not in by_kind["stopped"].waiting
    (other,) = (v for v in judgement.verdicts if v.kind != "stopped")
    assert other.culprits == (1,)
    assert "data.py:7" in other.cause


def _with_a_wait() -> Evidence:
    wait = Frame(file="/x/torch/distributed/distributed_c10d.py", line=3000, function="all_reduce")
    base = _evidence((0, 1, 2))
    frozen = base.ranks[1]
    inside = RankEvidence(
        rank=0, pid=100, alive=True,
        stacks=(ThreadStack(name="MainThread", main=True, frames=(wait, _OWN)),),
    )  # fmt: skip
    return Evidence(
        taken_at=base.taken_at,
        taken_ns=base.taken_ns,
        ranks={0: inside, 1: frozen, 2: RankEvidence(rank=2, pid=102, alive=True)},
    )


def _finished(
    process: ProcessActivity, since_s: float, workers: tuple[WorkerEvidence, ...] = ()
) -> Judgement:
    """All have finished, and rank 1 still has a process."""
    over = Outcome.FINISHED
    pulses = {r: pulse(r, Phase.ENDED, 1.0, batch=20, pid=100 + r, outcome=over) for r in (0, 2)}
    pulses[1] = pulse(1, Phase.TEARDOWN, 1.0, batch=20, pid=101, outcome=Outcome.FINISHED)
    evidence = _evidence((0, 1, 2))
    gone = ProcessActivity(pid=100)
    ranks = {r: replace(e, process=gone, stacks=()) for r, e in evidence.ranks.items()}
    ranks[1] = replace(evidence.ranks[1], process=process, workers=workers)
    return at(
        1.0 + since_s,
        pulses,
        evidence=replace(evidence, ranks=ranks),
        evidence_expected=True,
        fold=FoldState(),
        wall_s=1012.0,
    )


def test_a_finished_rank_that_does_not_exit_is_reported_with_its_line() -> None:
    assert _finished(_frozen(101), 5.0).verdicts == ()
    assert 1 in _finished(_frozen(101), 5.0).suspects
    (verdict,) = _finished(_frozen(101), 15.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("not_exiting", "warning", (1,))
    assert "rank 1 has finished and does not exit: it is stuck" in verdict.cause
    assert "data.py:7" in verdict.cause
    (verdict,) = _finished(_frozen(101), 700.0).verdicts
    assert verdict.level == "stalled"


def test_a_rank_that_exports_what_was_trained_is_left_alone() -> None:
    busy = replace(_frozen(101), cpu_share=0.9, switches=20)
    assert _finished(busy, 300.0).verdicts == ()
    assert _finished(ProcessActivity(pid=101), 300.0).verdicts == ()
    uploads = WorkerEvidence(process=replace(busy, pid=102), loader=False)
    assert _finished(_frozen(101), 300.0, (uploads,)).verdicts == ()
    idle = replace(uploads, process=_frozen(102))
    assert _finished(_frozen(101), 300.0, (idle,)).verdicts


def test_a_rank_that_only_polls_for_minutes_in_one_step_is_stalled() -> None:
    evidence = load("data_sleep")
    stuck = evidence.ranks[1]
    polling = ProcessActivity(
        pid=stuck.pid or 0, state="S", interval_s=2, cpu_share=0.0, switches=20
    )
    evidence = replace(evidence, ranks={**evidence.ranks, 1: replace(stuck, process=polling)})
    (slow,) = judged(evidence, later_s=8.0).verdicts
    (stalled,) = judged(evidence, later_s=130.0).verdicts
    assert (slow.level, slow.culprits) == ("slow", (1,))
    assert (stalled.level, stalled.culprits) == ("stalled", (1,))


def _sets_up(*inner: str) -> Evidence:
    """Rank 1 computes without a pause before training, within these functions; others wait."""
    evidence = load("data_spin")
    ranks = {r: replace(e, phase=Phase.SETUP.label) for r, e in evidence.ranks.items()}
    frames = tuple(replace(_OWN, function=name) for name in inner)
    stack = ThreadStack(name="MainThread", main=True, frames=frames)
    ranks[1] = replace(ranks[1], stacks=(stack,), earlier_stacks=(stack,))
    return replace(evidence, ranks=ranks)


def test_a_rank_that_indexes_before_training_is_slow_at_first() -> None:
    evidence = _sets_up("index", "setup")
    assert judged(evidence, later_s=1.0).verdicts == ()  # 29 s in all
    levels = [judged(evidence, later_s=s).verdicts[0].level for s in (40.0, 700.0)]
    assert levels == ["slow", "stalled"]


def test_a_rank_that_prepares_data_alone_has_a_longer_budget() -> None:
    evidence = _sets_up("tokenise", "prepare_data")
    assert judged(evidence, later_s=300.0).verdicts == ()
    (verdict,) = judged(evidence, later_s=700.0).verdicts
    assert (verdict.level, verdict.culprits) == ("stalled", (1,))


def test_a_rank_that_waits_for_a_program_that_works_is_not_frozen() -> None:
    wait = Frame(file="/usr/lib/python3.11/subprocess.py", line=1264, function="wait")
    evidence = _sets_up("upload", "on_train_epoch_end")
    (own,) = evidence.ranks[1].stacks
    stack = replace(own, frames=(wait, *own.frames))
    program = replace(_frozen(102), name="aws", switches=40)
    for child, kind in ((program, "slow_rank"), (replace(program, switches=0), "frozen")):
        rank = replace(
            evidence.ranks[1], stacks=(stack,), earlier_stacks=(stack,), process=_frozen(101),
            workers=(WorkerEvidence(process=child, loader=False),),
        )  # fmt: skip
        made = replace(evidence, ranks={**evidence.ranks, 1: rank})
        (verdict,) = judged(made, later_s=5.0).verdicts
        assert (verdict.kind, verdict.culprits) == (kind, (1,))
        assert ("for process 102 (aws), which works" in verdict.cause) == (kind == "slow_rank")


def test_a_worker_that_hangs_since_its_fork_is_named_and_not_one_that_waits_for_work() -> None:
    """As seen with Python 3.11.7: the new worker has no name yet, and answers no signal."""
    queue = Frame(file="/usr/lib/python3.11/multiprocessing/queues.py", line=113, function="get")
    wait = Frame(file="/torch/utils/data/dataloader.py", line=1293, function="_try_get_data")
    evidence = load("data_sleep")
    stack = ThreadStack(name="MainThread", main=True, frames=(queue, wait))
    idle = replace(_frozen(102), name="pt_data_worker", interval_s=34.0, switches=6)
    waits = WorkerEvidence(process=idle, stacks=(replace(stack, frames=(queue,)),))
    hung = WorkerEvidence(process=replace(_frozen(103), name="python", switches=0), loader=False)
    rank = replace(
        evidence.ranks[1], stacks=(stack,), earlier_stacks=(stack,), workers=(waits, hung),
        process=replace(_frozen(101), name="python"),
    )  # fmt: skip
    (verdict,) = judged(replace(evidence, ranks={**evidence.ranks, 1: rank}), 10.0).verdicts
    assert (verdict.kind, verdict.culprits) == ("worker_frozen", (1,))
    assert "DataLoader worker 103, which hangs since it was forked" in verdict.cause
    assert "112275" in (verdict.remedy or "")
    alone = replace(rank, workers=(waits,))
    (verdict,) = judged(replace(evidence, ranks={**evidence.ranks, 1: alone}), 10.0).verdicts
    assert "DataLoader worker 102" in verdict.cause
    assert "FROZEN: 6 context switches in 34.0 s" in verdict.cause
    ran = replace(hung, process=replace(idle, pid=103, name="python"))
    other = replace(rank, workers=(waits, ran))
    (verdict,) = judged(replace(evidence, ranks={**evidence.ranks, 1: other}), 10.0).verdicts
    assert "since it was forked" not in verdict.cause, "it has run, so it may be any process"
