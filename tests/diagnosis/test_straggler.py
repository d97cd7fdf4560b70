"""Tests of stragglers: long steps, and other processes that use a rank's processor."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ltui.training.diagnosis.evidence import Evidence, RankEvidence
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import HealthHistory, verdict_key
from ltui.training.shared.record_types import Phase
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import Verdict
from tests.diagnosis.machines import ALL_REDUCE, DATASET, at, evidence_of, frozen, process
from tests.diagnosis.recordings import judged, load
from tests.state.records import SECOND, pulse, steps


def _folded(*lengths: tuple[float, float, float], usual: int = 10) -> FoldState:
    """After ``usual`` steps of 0.1 s, steps of (length, what rank 0 and rank 1 fetch for)."""
    state = FoldState()
    for rank in range(2):
        state = fold(state, rank, steps(usual, 0.1, fetch_s=0.0))
        at_s = usual * 0.1
        for number, (length, *fetched) in enumerate(lengths):
            at_s += length
            one = steps(1, length, first=usual + 1 + number, start_s=at_s, fetch_s=fetched[rank])
            state = fold(state, rank, one)
    return state


def _end_s(state: FoldState) -> float:
    total = state.ranks[0].totals
    assert total is not None
    return total.t_ns / SECOND


def _rank(rank: int, still_s: float, *, switches: int = 3, delay: float = 0.0) -> RankEvidence:
    return frozen(
        rank, DATASET if rank == 1 else ALL_REDUCE, still_s=still_s,
        phase="fetch data" if rank == 1 else "backward",
        process=process(100 + rank, cpu_share=0.01, switches=switches, run_delay_share=delay),
    )  # fmt: skip


def _at(state: FoldState, later_s: float, phases: tuple[Phase, ...] = (), **more: Any) -> Judgement:
    """Since the last step rank 1 fetches data and the other one waits for it."""
    last_s = _end_s(state)
    phases = phases or (Phase.BACKWARD, Phase.FETCH)
    pulses = [pulse(r, phases[r], last_s, pid=100 + r) for r in state.ranks]
    return at(last_s + later_s, pulses, fold=state, **{"evidence_expected": True, **more})


def _seen(state: FoldState, later_s: float, **fields: float) -> Evidence:
    ranks = (_rank(r, later_s, **fields) for r in state.ranks)  # type: ignore[arg-type]
    return evidence_of(*ranks, taken_s=_end_s(state) + later_s)


def _straggling_since(seconds: float) -> HealthHistory:
    return HealthHistory(straggling_since_ns=round(seconds * SECOND), judged_ns=None)


def test_evidence_is_collected_soon_after_a_step_that_was_far_too_long() -> None:
    usual, slow = _folded(), _folded((4.8, 0.0, 4.7))
    assert _at(usual, 1.0).suspects == frozenset()
    assert _at(slow, 1.0).suspects == {0, 1}


def test_a_second_long_step_in_a_row_makes_a_straggler_and_a_sleeping_one_stalls() -> None:
    state = _folded((4.8, 0.0, 4.7))
    (verdict,) = _at(state, 2.5, evidence=_seen(state, 2.0)).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("straggler", "slow", (1,))
    assert "data.py:7" in verdict.cause
    asleep = _seen(state, 2.0, switches=0)
    (verdict,) = _at(state, 2.5, evidence=asleep).verdicts
    assert (verdict.kind, verdict.level) == ("straggler", "slow")
    (verdict,) = _at(state, 25.0, evidence=asleep).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("frozen", "stalled", (1,))
    single = _folded((4.8, 0.0, 4.7), (0.1, 0.0, 0.0))
    assert _at(single, 2.5, evidence=_seen(single, 2.0)).verdicts == ()


def test_a_straggler_of_long_steps_stays_active_while_its_next_step_begins() -> None:
    state = _folded((4.8, 0.0, 4.7))
    judgement = _at(state, 2.5, evidence=_seen(state, 2.0))
    history = replace(judgement.history, judged_ns=None)  # without a gap
    after = _folded((4.8, 0.0, 4.7), (4.8, 0.0, 4.7))
    (verdict,) = _at(after, 0.3, history=history).verdicts
    assert (verdict.kind, verdict.culprits) == ("straggler", (1,))
    assert "data.py:7" in verdict.cause
    level = _folded((4.8, 0.0, 4.7), (4.8, 4.7, 4.7))
    assert not _at(level, 0.3, history=history).verdicts


def test_six_long_steps_are_enough_if_no_step_was_short() -> None:
    slow = (2.0, 0.1, 1.7)
    state = _folded(*[slow] * 6, usual=4)
    since = _straggling_since(_end_s(state) - 3)
    (verdict,) = _at(state, 0.3, history=since, evidence_expected=False).verdicts
    assert (verdict.kind, verdict.culprits) == ("straggler", (1,))
    for other in ((2.0, 1.7, 1.7), (2.0, 1.7, 0.1)):
        state = _folded(*[slow] * 3, other, *[slow] * 2, usual=4)
        assert not _at(state, 0.3, history=since, evidence_expected=False).verdicts


def test_a_straggler_is_reported_with_what_uses_its_processor() -> None:
    state = _folded(*[(1.0, 0.0, 0.9)] * 12)
    since = _straggling_since(_end_s(state) - 3)
    judgement = _at(state, 0.3, history=since)
    assert judgement.verdicts == ()
    assert judgement.suspects == {1}
    looked = _at(state, 0.3, history=since, evidence=_seen(state, 0.2, delay=0.8))
    (verdict,) = looked.verdicts
    assert "other processes use its processor core" in verdict.cause
    assert "waits for a processor 80 %" in verdict.cause
    (verdict,) = _at(state, 0.3, history=since, evidence=_seen(state, 0.2)).verdicts
    assert "its data is slow" in verdict.cause
    assert "data.py:7" in str(verdict.place)
    assert str(verdict.remedy).startswith("See why that line takes longer on this rank only.")


def test_evidence_from_before_it_straggled_is_ignored() -> None:
    state = _folded(*[(1.0, 0.0, 0.9)] * 12)
    since = _straggling_since(_end_s(state) - 7)
    old = replace(_seen(state, 0.2, delay=0.8), taken_ns=round((_end_s(state) - 8) * SECOND))
    (verdict,) = _at(state, 0.3, history=since, evidence=old).verdicts
    assert "processor" not in verdict.cause


def test_no_rank_is_blamed_if_all_lack_a_processor() -> None:
    state = _folded((4.8, 4.7, 4.7))
    own = _rank(1, 2.0, switches=300, delay=0.7)
    ranks = (replace(own, rank=r, pid=100 + r) for r in state.ranks)
    evidence = evidence_of(*ranks, taken_s=_end_s(state) + 2.0)
    (verdict,) = _at(state, 3.0, (Phase.FORWARD,) * 2, evidence=evidence).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("slow_step", "slow", ())
    assert "the machine is overloaded" in verdict.cause


def _gpu(kind: str, cause: str, *ranks: int, place: str = "GPU 1") -> Verdict:
    return Verdict(
        kind=f"gpu_{kind}", level="warning", culprits=ranks, place=place, cause=f"{place}: {cause}"
    )


def test_a_straggler_that_computes_is_reported_with_its_gpus_problem() -> None:
    hot = _gpu("thermal", "thermal slowdown for 9 s (93 °C)", 1)
    full = _gpu("memory_full", "memory at 98 %", 1)
    elsewhere = _gpu("thermal", "thermal slowdown for 9 s (93 °C)", 0, place="GPU 0")
    both = _gpu("thermal", "thermal slowdown", 0, 1, place="GPUs 0, 1")
    assert "its computation is slow" in _computing(()).cause
    assert "GPU" not in _computing((full, elsewhere)).cause
    verdict = _computing((full, hot))
    assert "in forward: GPU 1: thermal slowdown for 9 s (93 °C)" in verdict.cause
    assert "cooling" in (verdict.remedy or "")
    assert _computing((both,)).cause.count("GPUs 0, 1") == 1


def _computing(devices: tuple[Verdict, ...]) -> Verdict:
    """The straggler of a run in which rank 1 computes three times as long as the others."""
    state = FoldState()
    for rank in range(2):
        rows = steps(60, 0.3, fetch_s=0.0, forward_s=0.28 if rank == 1 else 0.05)
        state = fold(state, rank, rows)
    since = _straggling_since(_end_s(state) - 3)
    (verdict,) = _at(
        state, 0.1, (Phase.FORWARD,) * 2, history=since, evidence_expected=False,
        gpu_verdicts=devices,
    ).verdicts  # fmt: skip
    return verdict


def test_a_stall_on_a_gpu_that_reported_an_error_names_it() -> None:
    plain = _stuck(())
    assert "XID" not in _stuck((_gpu("xid", "XID 79: the GPU fell off the bus", 0),)).cause
    assert "heat" not in _stuck((_gpu("thermal", "heat", 1),)).cause
    over = replace(_gpu("xid", "XID 79: the GPU fell off the bus", 1), ended=1000.0)
    assert _stuck((over,)) == plain
    verdict = _stuck((_gpu("xid", "XID 79: the GPU fell off the bus", 1),))
    assert verdict.cause == f"{plain.cause}; GPU 1: XID 79: the GPU fell off the bus"
    assert "nvidia-smi" in (verdict.remedy or "")


def _stuck(devices: tuple[Verdict, ...]) -> Verdict:
    """Rank 1 is stuck in its dataset, which has nothing to do with its GPU as far as is known."""
    (verdict,) = judged(load("data_sleep"), gpu_verdicts=devices).verdicts
    return verdict


def _contended(delays: dict[int, float]) -> list[Verdict]:
    """Three steps of 1.3 s of which rank 1 works and the other one waits for it."""
    state = _folded(*[(1.3, 0.05, 1.2)] * 3)
    judgement = _at(
        state, 0.3, (Phase.BACKWARD, Phase.FORWARD),
        history=_straggling_since(_end_s(state) - 3),
        evidence=_seen(state, 0.2, delay=delays[1]), cpu_delays=delays,
    )  # fmt: skip
    return list(judgement.verdicts)


def test_a_crowded_rank_is_reported_after_two_long_steps() -> None:
    """Steps of more than half a second are too few for the windows of steps alone."""
    (verdict,) = _contended({0: 0.05, 1: 0.9})
    assert (verdict.kind, verdict.level, verdict.culprits) == ("straggler", "slow", (1,))
    assert "other processes use its processor core" in verdict.cause


def test_a_machine_that_is_short_of_processors_for_all_ranks_has_no_straggler() -> None:
    assert _contended({0: 0.7, 1: 0.9}) == []
    assert _contended({0: 0.0, 1: 0.3}) == []
    assert _contended({0: 0.9, 1: 0.05}) == [], "it is not the rank that the others wait for"


def test_a_crowded_rank_stays_reported_while_the_difference_shrinks() -> None:
    (verdict,) = _contended({0: 0.05, 1: 0.9})
    level = _folded(*[(1.3, 0.05, 1.2)] * 3, *[(1.3, 1.2, 1.2)] * 9)
    active = HealthHistory(active={verdict_key(verdict): verdict})
    for delays, kept in (({0: 0.3, 1: 0.6}, True), ({0: 0.5, 1: 0.6}, False)):
        judgement = _at(level, 0.3, (Phase.FORWARD,) * 2, history=active, cpu_delays=delays)
        assert [v.kind for v in judgement.verdicts] == (["straggler"] if kept else [])
