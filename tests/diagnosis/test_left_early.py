"""Tests that distinguish a rank that leaves an epoch early from one that has fewer batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.collective_positions import UnfinishedCollective
from ltui.training.diagnosis.judge_input import HealthHistory, JudgeInput, PreparedInput, prepare
from ltui.training.diagnosis.stalls.uneven_batches import find_uneven_ranks, finished_early_verdict
from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.state.record_fold import FoldedEvent, FoldState, RankFold
from ltui.training.state.run_snapshot import Verdict
from tests.diagnosis.machines import at
from tests.diagnosis.recordings import judged, load
from tests.state.records import pulse

EQUAL = {0: 3000, 1: 3000, 2: 3000}


@pytest.mark.parametrize(("name", "done"), [("stop_one", 9), ("swallowed", 8)])
def test_equally_long_data_makes_it_a_departure(name: str, done: int) -> None:
    (verdict,) = judged(load(name), later_s=4.0, planned=EQUAL).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("left_early", "stalled", (1,))
    assert f"left epoch 0 early, after {done} of 3000 planned batches" in verdict.cause
    assert "ranks 0 and 2 are still in it" in verdict.cause
    assert "uneven" not in verdict.cause
    assert "should_stop" in str(verdict.remedy)
    assert "swallow" in str(verdict.remedy)
    assert verdict.waiting == (0, 2)


@pytest.mark.parametrize("name", ["stop_one", "swallowed"])
def test_shorter_data_or_unknown_plans_leave_it_uneven(name: str) -> None:
    evidence = load(name)
    shorter = {**EQUAL, 1: evidence.ranks[1].epoch_batches[0]}
    for planned in (shorter, None, {0: 3000, 2: 3000}):
        (verdict,) = judged(evidence, later_s=4.0, planned=planned).verdicts
        assert (verdict.kind, verdict.culprits) == ("uneven", (1,))


def _rank(number: int, epochs: dict[int, int], **fields: object) -> RankFold:
    return RankFold(
        rank=number, plan={"batches_per_epoch": 12}, epoch_batches=epochs, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def _verdict(fold: FoldState, *pulses: PulseState, **more: Any) -> Verdict:
    (verdict,) = at(10, pulses, fold=fold, **more).verdicts
    return verdict


def _error(message: str) -> FoldedEvent:
    fields = {"type": "RuntimeError", "message": message, "t": 1005.0}
    return FoldedEvent(rank=0, t_ns=0, kind="exception", text="", fields=fields)


CLOSED = _error("Connection closed by peer")
RAISED = pulse(0, Phase.EXCEPTION, 4.0, outcome=Outcome.RAISED)
ENDED = pulse(1, Phase.ENDED, 3.0, global_step=9, outcome=Outcome.FINISHED)


def test_of_two_ranks_with_different_sizes_both_are_named() -> None:
    """The back end may abort the rank that receives the wrong size as well as the other."""
    error = _error("preamble.length 16 vs 24")
    fold = FoldState(ranks={0: _rank(0, {}, exception=error), 1: _rank(1, {})})
    verdict = _verdict(fold, RAISED, pulse(1, Phase.FORWARD, 4.0))
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("mismatch", (0, 1), ())
    assert "ranks 0 and 1 called a collective with different sizes" in verdict.cause
    assert "unknown which of them is wrong: rank 0 raised RuntimeError" in verdict.cause


def test_errors_of_the_other_ranks_are_consequences() -> None:
    """The rank ended its process, so the others' back ends only report a closed connection."""
    fold = FoldState(ranks={0: _rank(0, {0: 9}, exception=CLOSED), 1: _rank(1, {0: 9})})
    verdict = _verdict(fold, RAISED, ENDED)
    assert (verdict.kind, verdict.level, verdict.culprits) == ("left_early", "dead", (1,))
    assert "left epoch 0 early, after 9 of 12 planned batches" in verdict.cause
    assert verdict.cause.endswith("; the error of rank 0 followed from that")
    whole = replace(fold, ranks={0: fold.ranks[0], 1: _rank(1, {0: 12})})
    verdict = _verdict(whole, RAISED, ENDED)
    assert (verdict.kind, verdict.culprits) == ("raised", (0,))


@pytest.mark.parametrize("gone", [0, 1])
def test_a_drift_warning_names_the_rank_that_left(gone: int) -> None:
    other = 1 - gone
    fold = FoldState(
        ranks={
            gone: _rank(gone, {0: 9, 1: 1}, epoch=1, batch=0, global_step=10),
            other: _rank(other, {0: 10}, epoch=0, batch=9, global_step=10),
        }
    )
    pulses = (
        pulse(gone, Phase.FORWARD, 9.9, epoch=1, batch=1, global_step=10),
        pulse(other, Phase.FORWARD, 9.9, epoch=0, batch=10, global_step=10),
    )
    verdict = _verdict(fold, *pulses, history=HealthHistory(drift_ns=(1, 9_900_000_000)))
    assert (verdict.kind, verdict.culprits) == ("drift", (gone,))
    assert "it left epoch 0 early, after 9 of 12 batches" in verdict.cause


def test_ranks_in_validations_of_different_epochs_are_not_uneven() -> None:
    pulses = {r: pulse(r, Phase.VALIDATION, epoch=r) for r in range(2)}
    inputs = prepare(JudgeInput(now_ns=0, policy=StallPolicy(), pulses=pulses))
    assert find_uneven_ranks(inputs, {0, 1}) is None


def _program_inputs(*pulses: PulseState) -> PreparedInput:
    hello = {"program": "PyTorch DDP"}
    return prepare(
        JudgeInput(
            now_ns=0,
            policy=StallPolicy(),
            pulses={p.rank: dataclasses.replace(p, epoch=-1) for p in pulses},
            fold=FoldState(ranks={p.rank: RankFold(rank=p.rank, hello=hello) for p in pulses}),
        )
    )


def test_a_rank_of_a_program_that_evaluates_before_the_others_is_early() -> None:
    trains = pulse(0, Phase.COMPUTE, global_step=20)
    inputs = _program_inputs(trains, pulse(1, Phase.VALIDATION, global_step=20))
    uneven = find_uneven_ranks(inputs, {0, 1})
    assert uneven is not None
    assert uneven.ranks == (1,)
    assert uneven.text.startswith("evaluates after step 20 while rank 0 goes on")
    assert "limit_train_batches" not in uneven.remedy


@pytest.mark.parametrize("phase", [Phase.FETCH, Phase.OPTIMIZER, Phase.CHECKPOINT])
def test_the_phases_of_a_training_program_do_not_show_who_is_early(phase: Phase) -> None:
    inputs = _program_inputs(pulse(0, Phase.COMPUTE), pulse(1, phase))
    assert find_uneven_ranks(inputs, {0, 1}) is None


def test_a_rank_of_a_program_that_ends_early_is_named_by_its_step() -> None:
    inputs = _program_inputs(pulse(0, Phase.COMPUTE, global_step=9), ENDED)
    unfinished = UnfinishedCollective(group="0", seq=70, at={}, absent=(1,))
    verdict = finished_early_verdict(inputs, (1,), (0,), unfinished)
    assert "rank 1 finished early after step 9 while others are at step 10" in verdict.cause


def test_a_rank_of_a_program_that_ended_is_the_cause_of_a_lost_connection() -> None:
    hello = {"program": "PyTorch DDP"}
    ranks = {0: RankFold(rank=0, hello=hello, exception=CLOSED), 1: RankFold(rank=1, hello=hello)}
    verdict = _verdict(FoldState(ranks=ranks), RAISED, ENDED)
    assert (verdict.kind, verdict.culprits) == ("finished_early", (1,))
    assert "rank 1 ended its training at step 9 while the others went on" in verdict.cause
    assert verdict.cause.endswith("the error of rank 0 followed from that")
