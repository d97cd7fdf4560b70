"""The fold and the windows: any split of the records gives the same, and nothing freezes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ltui.training.diagnosis.rules.early_warnings import loss_warning
from ltui.training.shared.record_types import Outcome, Phase, RecordKind
from ltui.training.state.metric_name_patterns import MAX_RANK_RATES, TOTAL_RANK, is_evaluation
from ltui.training.state.record_fold import (
    EVENTS_KEPT,
    RECENT_STEPS,
    FoldState,
    fold,
    fold_many,
    step_rows,
)
from ltui.training.state.run_snapshot import MetricValue, RankState
from ltui.training.state.snapshot_from_fold import (
    POINT_INTERVAL_S,
    metrics,
    next_point,
    progress,
    rank_snapshots,
    throughput,
)
from ltui.training.tensor_queue.queue_reader import Poll, Record
from tests.required import required
from tests.state.records import SECOND, labelled, pulse, step, steps

values = st.floats(allow_nan=True, allow_infinity=True, width=64)
gaps = st.floats(min_value=1e-4, max_value=30.0)

UNHURRIED = settings(suppress_health_check=[HealthCheck.too_slow])
"""For a machine that is busy, on which it takes long to generate inputs."""


@st.composite
def histories(draw: st.DrawFn) -> list:
    t_s, epoch, records = 0.0, 0, []
    for index in range(draw(st.integers(1, 60))):
        t_s += draw(gaps)
        epoch += draw(st.integers(0, 9)) == 0
        records.append(
            step(
                index + 1,
                t_s,
                epoch=epoch,
                loss=draw(values),
                step_s=draw(st.one_of(st.just(math.nan), gaps)),
                fetch_s=draw(st.one_of(st.just(math.nan), gaps)),
            )
        )
    return records


@UNHURRIED
@given(histories(), st.lists(st.integers(0, 60), max_size=5), st.floats(0, 1000))
def test_any_split_folds_to_the_same_within_bounds_and_without_impossible_rates(
    records: list, cuts: list[int], later_s: float
) -> None:
    whole = fold(FoldState(), 0, records).ranks[0]
    state = FoldState()
    edges = [0, *sorted(cuts), len(records)]
    for begin, end in pairwise(edges):
        state = fold(state, 0, records[begin:end])
    split = state.ranks[0]
    assert repr(split.totals) == repr(whole.totals)
    assert split.recent_totals == whole.recent_totals
    assert split.recent_step_s == whole.recent_step_s
    assert repr(split.recent_loss) == repr(whole.recent_loss)
    assert split.between_epochs_s == pytest.approx(whole.between_epochs_s)
    assert repr(split.samples_per_s) == repr(whole.samples_per_s)

    found = throughput(state, records[-1].t_ns + round(later_s * SECOND))
    for rate in (found.samples_per_s, found.steps_per_s, found.best_samples_per_s):
        assert rate is None or (rate >= 0 and math.isfinite(rate))
    assert found.data_wait_share is None or 0 <= found.data_wait_share <= 1

    rank = fold(FoldState(), 0, records * 3).ranks[0]
    assert len(rank.recent_step_s) <= RECENT_STEPS
    assert len(rank.recent_loss) <= RECENT_STEPS
    assert len(rank.recent_totals) <= 96
    finite = [r.array[4] for r in records if math.isfinite(r.array[4])]
    if rank.loss is not None:
        assert rank.loss.best_min == min(finite, default=None)
        assert rank.loss.best_max == max(finite, default=None)


def test_folding_leaves_the_old_value_alone() -> None:
    first = fold(FoldState(), 0, steps(5, 0.1))
    before = repr(first)
    fold(first, 0, steps(5, 0.1, first=6, start_s=0.5))
    fold(first, 1, steps(5, 0.1))
    assert repr(first) == before


def test_rates_of_ranks_add_up() -> None:
    polls = {rank: Poll(tuple(steps(101, 0.1, fetch_s=0.02)), 0) for rank in range(4)}
    state = fold_many(FoldState(), polls)
    found = throughput(state, 10 * SECOND)
    assert found.samples_per_s == pytest.approx(4 * 320)
    assert found.best_samples_per_s == pytest.approx(4 * 320)
    assert found.steps_per_s == pytest.approx(10)
    assert found.data_wait_share == pytest.approx(0.2)


def test_slow_steps_have_a_rate_too() -> None:
    state = fold(FoldState(), 0, steps(5, 30.0, samples=300))
    assert throughput(state, 4 * 30 * SECOND).samples_per_s == pytest.approx(10)
    assert throughput(state, (4 * 30 + 20) * SECOND).samples_per_s == pytest.approx(10)


def test_short_steps_after_a_long_one_have_a_rate() -> None:
    """As with a loader that takes longer than a window to begin an epoch of a second."""
    records = [*steps(40, 0.02), step(41, 24.0, step_s=23.0)]
    state = fold(FoldState(), 0, [*records, *steps(30, 0.02, first=42, start_s=24.02)])
    found = throughput(state, 25 * SECOND)
    assert found.samples_per_s == pytest.approx(32 * 31 / (23 + 30 * 0.02))
    assert found.best_samples_per_s == pytest.approx(found.samples_per_s)


def test_a_rate_does_not_decay_and_is_unknown_after_a_window_without_a_batch() -> None:
    state = fold(FoldState(), 0, steps(101, 0.1))
    rates = [throughput(state, (10 + s) * SECOND).samples_per_s for s in (0, 2, 4, 8)]
    assert rates == [pytest.approx(320)] * 4
    stale = throughput(state, 30 * SECOND)
    assert (stale.samples_per_s, stale.steps_per_s, stale.data_wait_share) == (None, None, None)
    assert stale.best_samples_per_s == pytest.approx(320)


def test_time_between_steps_is_no_part_of_a_rate() -> None:
    """A validation of six seconds lies between the two halves."""
    records = [*steps(40, 0.1), *steps(40, 0.1, first=41, start_s=10.0, epoch=1)]
    state = fold(FoldState(), 0, records)
    found = throughput(state, 14 * SECOND)
    assert found.samples_per_s == pytest.approx(320)
    assert found.best_samples_per_s == pytest.approx(320)


def test_the_figure_of_a_run_is_the_sum_of_its_ranks_and_never_above_the_best() -> None:
    fast, slow = steps(60, 0.1), steps(60, 0.1, samples=16)
    state = FoldState()
    for i in range(0, 60, 7):
        state = fold(fold(state, 0, fast[i : i + 7]), 1, slow[i : i + 7])
        now = required(state.ranks[0].totals)
        found = throughput(state, now.t_ns)
        rows = rank_snapshots(state, {}, {}, now.t_ns)
        rates = [row.samples_per_s for row in rows if row.samples_per_s is not None]
        if found.samples_per_s is not None:
            assert found.samples_per_s == pytest.approx(sum(rates))
            assert found.samples_per_s <= required(found.best_samples_per_s) * (1 + 1e-9)


def test_batches_of_unknown_size_have_no_rate_and_a_few_quick_steps_are_no_record() -> None:
    state = fold(FoldState(), 0, steps(40, 0.1, samples=math.nan))
    assert throughput(state, 4 * SECOND).samples_per_s is None
    assert state.best_samples_per_s is None
    assert fold(FoldState(), 0, steps(3, 0.001)).best_samples_per_s is None


def test_labels_become_hello_plan_events_and_metrics() -> None:
    state = fold(
        FoldState(),
        2,
        [
            labelled(
                RecordKind.HELLO, {"rank": 2, "host": "a", "device": "cuda:2", "world_size": 4}
            ),
            labelled(RecordKind.PLAN, {"max_steps": 50}),
            labelled(RecordKind.METRICS, {"names": ["a", "b"], "step": 3}, [1.0, math.nan]),
            labelled(RecordKind.METRICS, {"names": ["a"], "step": 4}, [0.5]),
            labelled(
                RecordKind.EVENT, {"kind": "exception", "text": "Raised.", "type": "ValueError"}
            ),
            labelled(RecordKind.EVENT, {"kind": "telemetry_off", "error": "full"}),
        ],
        missed=7,
    )
    rank = state.ranks[2]
    assert rank.metrics["a"] == MetricValue(last=0.5, step=4, best_min=0.5, best_max=1.0)
    assert math.isnan(rank.metrics["b"].last)
    assert rank.metrics["b"].best_min is None
    assert [e.kind for e in state.events] == ["exception", "telemetry_off"]
    (shown,) = rank_snapshots(state, {}, {2: RankState.DEAD}, 0)
    assert (shown.host, shown.device, shown.missed_records) == ("a", "cuda:2", 7)
    assert shown.age_s is None
    assert shown.note == "Raised."


def test_labels_that_are_no_json_are_passed_over() -> None:
    broken = [
        labelled(RecordKind.HELLO, {}).__class__(seq=0, kind=k, t_ns=0, label=label, array=None)  # type: ignore[arg-type]
        for k in (2, 3, 4, 5)
        for label in (b"", b"\xff", b"[1]", b"{")
    ]
    state = fold(FoldState(), 0, broken)
    assert state.ranks[0].hello is None
    assert state.events == ()


def test_events_are_bounded_and_counted() -> None:
    events = [labelled(RecordKind.EVENT, {"kind": "note", "text": str(i)}) for i in range(1000)]
    state = fold(FoldState(), 0, events)
    assert len(state.events) == EVENTS_KEPT
    assert state.events_seen == 1000
    assert state.events[-1].text == "999"


def test_the_loss_is_the_users_where_they_log_it_and_no_metric_without_any() -> None:
    state = fold(FoldState(), 0, steps(3, 0.1, loss=2.0))
    assert metrics(state)["train/loss"].last == 2.0
    logged = labelled(RecordKind.METRICS, {"names": ["train/loss"], "step": 3}, [7.0])
    assert metrics(fold(state, 0, [logged]))["train/loss"].last == 7.0
    without = fold(FoldState(), 0, steps(20, 0.1, loss=math.nan))
    assert (metrics(without), without.ranks[0].bad_loss) == ({}, 0)


@pytest.mark.parametrize("name", ["train/loss", "loss", "generator_loss"])
def test_a_bad_loss_that_is_only_logged_is_noted(name: str) -> None:
    """On a GPU, and in a program without a Trainer, the rows of steps have no loss."""

    def logged(step: int, value: float, name: str = name) -> Record:
        return labelled(RecordKind.METRICS, {"names": [name], "step": step, "t": 5.0}, [value])

    state = fold(FoldState(), 0, [*steps(3, 0.1, loss=math.nan), logged(3, 1.0)])
    state = fold(state, 0, [logged(4, math.inf), logged(5, math.nan), logged(5, 1.0, "val/loss")])
    state = fold(state, 0, [logged(6, -math.inf)])
    rank = state.ranks[0]
    assert (rank.bad_loss, rank.bad_loss_step, rank.bad_loss_wall_s) == (3, 4, 5.0)
    assert "is -inf since step 4" in required(loss_warning(state)).cause
    assert loss_warning(fold(state, 0, [logged(7, 0.5)])) is None


def test_rows_of_other_layouts_are_padded_or_cut() -> None:
    usual = step(1, 0.0)
    values = usual.array
    assert isinstance(values, np.ndarray)
    short = replace(usual, seq=1, t_ns=1, array=values[:5])
    long = replace(usual, seq=2, t_ns=2, array=np.array([*values, 9.0]))
    rows = step_rows([usual, short, long])[1]
    assert rows.shape == (3, 16)
    assert math.isnan(rows[1, 5])


def test_the_end_is_estimated_from_steps_and_pauses_between_epochs() -> None:
    plan = labelled(RecordKind.PLAN, {"max_steps": 40, "max_epochs": 4, "batches_per_epoch": 10})
    records = [plan, *steps(10, 0.5), *steps(6, 0.5, first=11, start_s=4.5 + 3.5, epoch=1)]
    state = fold(FoldState(), 0, records)
    last_s = records[-1].t_ns / SECOND
    here = pulse(0, Phase.FORWARD, last_s, epoch=1, global_step=16)
    found = progress(state, {0: here}, round(last_s * SECOND))
    assert (found.global_step, found.max_steps, found.epoch) == (16, 40, 1)
    # 24 steps of half a second, and two pauses of three seconds.
    assert found.eta_s == pytest.approx(24 * 0.5 + 2 * 3.0, rel=0.1)
    still = progress(state, {0: here}, round((last_s + 60) * SECOND))
    assert still.eta_s is None
    validating = pulse(0, Phase.VALIDATION, last_s, epoch=1, global_step=16)
    assert progress(state, {0: validating}, round((last_s + 60) * SECOND)).eta_s is not None


def test_the_position_is_that_of_the_furthest_rank_when_the_lowest_has_ended() -> None:
    ahead = pulse(1, Phase.COMPUTE, 0.0, global_step=80)
    for outcome, step_ in ((Outcome.RUNNING, 20), (Outcome.FINISHED, 80)):
        lowest = replace(pulse(0, Phase.COMPUTE, 0.0, global_step=20), outcome=outcome)
        assert progress(FoldState(), {0: lowest, 1: ahead}, 0).global_step == step_


def test_a_pause_by_the_user_does_not_delay_the_estimated_end() -> None:
    plan = labelled(RecordKind.PLAN, {"max_steps": 60, "max_epochs": 1, "batches_per_epoch": 60})
    label = {"kind": "continued", "text": "Continued at step 10."}
    paused_s = 600.0
    continued = replace(labelled(RecordKind.EVENT, label), t_ns=round((5 + paused_s) * SECOND))
    after = steps(10, 0.5, first=11, start_s=5 + paused_s + 0.5)
    state = fold(FoldState(), 0, [plan, *steps(10, 0.5), continued, *after])
    last_s = after[-1].t_ns / SECOND
    here = pulse(0, Phase.FORWARD, last_s, global_step=20)
    found = progress(state, {0: here}, round(last_s * SECOND))
    assert found.eta_s == pytest.approx(40 * 0.5, rel=0.1)


def test_steps_follow_from_epochs_where_the_plan_names_none() -> None:
    hello = labelled(RecordKind.HELLO, {"accumulate_grad_batches": 4, "world_size": 2})
    plan = labelled(RecordKind.PLAN, {"max_steps": None, "max_epochs": 3, "batches_per_epoch": 10})
    state = fold(FoldState(), 0, [hello, plan])
    found = progress(state, {}, 0)
    assert found.max_steps == 9
    assert found.world_size == 2
    assert found.eta_s is None


def test_a_part_of_a_step_that_is_not_measured_is_unknown_and_not_zero() -> None:
    """A program without Lightning has no forward pass that ltui could see."""
    hello = labelled(RecordKind.HELLO, {"program": "PyTorch DDP", "saves": False})
    state = fold(FoldState(), 0, [hello, *steps(20, 0.1, fetch_s=0.05)])
    speed = throughput(state, round(1.95 * SECOND))
    assert speed.fetch_share == pytest.approx(0.5)
    assert (speed.forward_share, speed.optimizer_share) == (None, None)
    assert (state.program, state.saves_checkpoints) == ("PyTorch DDP", False)
    assert FoldState().saves_checkpoints


def test_the_best_rate_is_that_of_a_full_window() -> None:
    """The first seconds are often faster: caches are empty, or the batches wait already."""
    fast = fold(FoldState(), 0, steps(31, 0.1))
    assert throughput(fast, 3 * SECOND).best_samples_per_s == pytest.approx(320)
    slower = fold(fast, 0, steps(100, 0.2, first=32, start_s=3.2))
    best = throughput(slower, 24 * SECOND).best_samples_per_s
    assert best == pytest.approx(160)
    short = fold(slower, 0, steps(20, 0.1, first=132, start_s=23.2))
    assert required(throughput(short, 26 * SECOND).best_samples_per_s) > 160
    earlier = FoldState(best_samples_per_s=900.0, best_is_provisional=False)
    resumed = fold(earlier, 0, steps(200, 0.1))
    assert resumed.best_samples_per_s == 900.0


def test_before_the_first_batch_there_is_no_best_rate() -> None:
    started = FoldState()
    for _ in range(2):
        started = fold(started, 0, [labelled(RecordKind.HELLO, {"saves": True})])
        assert started.best_samples_per_s is None
    assert fold(started, 0, steps(31, 0.1)).best_samples_per_s == pytest.approx(320)


def fold_of(*ranks: Sequence[Record]) -> FoldState:
    state = FoldState()
    for rank, records in enumerate(ranks):
        state = fold(state, rank, records)
    return state


def test_a_point_of_the_throughput_needs_a_rate_of_every_rank() -> None:
    assert next_point(FoldState(), [], None) is None
    assert next_point(fold_of(steps(20, 0.1)), [0, 1], None) is None
    both = fold_of(steps(20, 0.1), steps(20, 0.1, samples=64))
    point = required(next_point(both, [0, 1], None))
    assert point.rates == pytest.approx({TOTAL_RANK: 320 + 640, 0: 320, 1: 640})
    assert point.step == 20
    assert point.rates[TOTAL_RANK] == throughput(both, point.t_ns).samples_per_s
    assert next_point(both, [0, 1], point) is None, "no step has ended since"
    later = fold_of(*[steps(20 + int(POINT_INTERVAL_S / 0.1) + 1, 0.1)] * 2)
    assert next_point(later, [0, 1], point) is not None


@pytest.mark.parametrize("ranks", [1, MAX_RANK_RATES + 1])
def test_ranks_have_no_point_of_their_own_if_there_is_one_or_too_many(ranks: int) -> None:
    point = required(next_point(fold_of(*[steps(20, 0.1)] * ranks), range(ranks), None))
    assert point.rates == pytest.approx({TOTAL_RANK: 320 * ranks})


def test_names_say_whether_a_metric_is_of_training_or_of_evaluation() -> None:
    evaluation = [
        "val/loss",
        "loss_test",
        "eval/acc",
        "val1/loss",
        "val0_acc",
        "validate/loss",
        "testing/acc",
    ]
    training = ["train/loss", "value_loss", "valence", "lr", "latest/loss"]
    assert [name for name in (*evaluation, *training) if is_evaluation(name)] == evaluation
