"""Tests of ranks in several process groups, and of groups used in different orders."""

from __future__ import annotations

from collections.abc import Mapping

from ltui.training.diagnosis.collective_positions import collective_positions
from ltui.training.diagnosis.evidence import (
    Collective,
    Evidence,
    Frame,
    ProcessActivity,
    RankEvidence,
    ThreadStack,
)
from ltui.training.shared.record_types import Phase
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import Verdict
from tests.diagnosis.machines import at
from tests.state.records import SECOND, pulse, steps

_C10D = Frame(file="/x/torch/distributed/distributed_c10d.py", line=3000, function="all_reduce")
_DATA = Frame(file="/home/user/data.py", line=7, function="__getitem__")


def _line(rank: int) -> Frame:
    return Frame(file="/home/user/train.py", line=10 + rank, function="training_step")


def _rank(rank: int, members: Mapping[str, tuple[int, ...]], waits_in: str | None) -> RankEvidence:
    """Return a rank that waits in the first collective of group ``waits_in``.

    It has done nine collectives of the default group. With None it is in its dataset.
    """
    entries = [Collective(group="0", seq=n, op="all_reduce", retired=True) for n in range(1, 10)]
    if waits_in is not None:
        entries.append(Collective(group=waits_in, seq=1, op="all_reduce", call_site=_line(rank)))
    frames = (_DATA,) if waits_in is None else (_C10D, _line(rank))
    return RankEvidence(
        rank=rank, pid=100 + rank, alive=True, joined=True,
        groups={g: of for g, of in members.items() if rank in of},
        last_enqueued={"0": 9} | ({waits_in: 1} if waits_in is not None else {}),
        collectives=tuple(entries),
        stacks=(ThreadStack(name="MainThread", main=True, frames=frames),),
        process=ProcessActivity(pid=100 + rank, state="S", interval_s=2, cpu_share=0.0, switches=0),
    )  # fmt: skip


def _only_verdict(members: Mapping[str, tuple[int, ...]], *waits_in: str | None) -> Verdict:
    """Return the only verdict on ranks that wait in these groups."""
    everybody = tuple(range(len(waits_in)))
    every = {"0": everybody, **members}
    state = FoldState()
    for rank in everybody:
        state = fold(state, rank, steps(20, 0.1))
    evidence = Evidence(
        taken_at=1010.0, taken_ns=10 * SECOND,
        ranks={r: _rank(r, every, group) for r, group in enumerate(waits_in)},
    )  # fmt: skip
    pulses = {r: pulse(r, Phase.FORWARD, 4.0, batch=20, pid=100 + r) for r in everybody}
    (verdict,) = at(12, pulses, fold=state, evidence=evidence, evidence_expected=True).verdicts
    return verdict


def test_a_rank_that_uses_groups_in_another_order_is_blamed() -> None:
    verdict = _only_verdict({"1": (0, 1, 2), "2": (0, 1, 2)}, "1", "2", "1")
    assert (verdict.kind, verdict.level, verdict.culprits) == ("mismatch", "stalled", (1,))
    assert verdict.waiting == (0, 2)
    assert "rank 1 all_reduce #1 of group 2 at train.py:11" in verdict.cause
    assert "different orders" in verdict.cause


def test_two_ranks_that_use_groups_in_different_orders_are_both_blamed() -> None:
    verdict = _only_verdict({"1": (0, 1), "2": (0, 1)}, "1", "2")
    assert (verdict.kind, verdict.culprits) == ("mismatch", (0, 1))
    assert "it is unknown which" in verdict.cause


def test_a_rank_missing_from_a_group_that_it_has_never_used_is_blamed() -> None:
    verdict = _only_verdict({"1": (0, 1, 2)}, "1", None, "1")
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("frozen", (1,), (0, 2))
    assert "data.py:7" in verdict.cause


def test_a_chain_of_waits_leads_to_the_rank_that_does_not_wait() -> None:
    # Rank 1 waits for rank 0 in one group, rank 0 for rank 2 in another.
    verdict = _only_verdict({"1": (0, 1), "2": (0, 2)}, "2", "1", None)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("frozen", (2,), (0, 1))


def test_a_rank_that_is_no_member_of_a_group_is_not_missing_from_it() -> None:
    verdict = _only_verdict({"1": (0, 1)}, "1", "1", None)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("transport", (), (0, 1))


def test_a_member_that_has_never_used_a_group_has_a_position_in_it() -> None:
    every = {"0": (0, 1, 2), "1": (0, 1, 2), "2": (0, 2)}
    close = {r: _rank(r, every, g) for r, g in enumerate(("1", None, "1"))}
    seen = {(f.rank, f.group): f.last_enqueued for f in collective_positions(close)}
    assert {r: seen[r, "1"] for r in range(3)} == {0: 1, 1: 0, 2: 1}
    assert (0, "2") not in seen
