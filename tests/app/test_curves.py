"""Arithmetic on curves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ltui.app.live.curve_arithmetic import (
    GrowingCurve,
    concatenate,
    empty_curve,
    epoch_positions,
    halve,
    join,
    select_points,
    smooth,
    splice,
    throughput_curve,
)
from ltui.app.live.metric_history import LatestCurveRequest, MetricHistory, ThroughputHistory
from ltui.app.live.run_curves import RunCurves
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.tensor_queue.queue_reader import Record
from ltui.training.tensor_queue.record_types import RecordKind, StepField
from tests.app.frames import curve
from tests.state.records import labelled, step, steps


def test_join_puts_live_points_over_redone_steps() -> None:
    stored = curve([1, 2, 3, 4, 5])
    live = curve([30, 40], first=3)
    joined = join(stored, live)
    assert joined.steps.tolist() == [1, 2, 3, 4]
    assert joined.mean.tolist() == [1, 2, 30, 40]
    assert len(join(None, None)) == 0
    assert join(stored, None) is stored
    assert join(None, live) is live
    assert join(empty_curve(), live) is live


def test_growing_past_its_bound_merges_the_old_and_keeps_the_new_as_it_is() -> None:
    growing = GrowingCurve(recent=8, older=4)
    for i in range(40):
        growing.append(i, 0, float(i), float(i % 2))
    found = growing.curve()
    assert len(found) <= 4 + 2 * 8
    assert found.steps[-8:].tolist() == list(range(32, 40))
    assert found.mean[-8:].tolist() == [0, 1] * 4
    assert found.count.sum() == 40
    assert found.mean[:2].tolist() == [0.5, 0.5]
    assert (found.low.min(), found.high.max()) == (0.0, 1.0)
    assert np.all(np.diff(found.steps) > 0)


def test_rows_at_once_are_the_same_as_one_by_one() -> None:
    rows = np.column_stack([np.arange(100.0), np.zeros(100), np.arange(100.0), np.arange(100.0)])
    one, many = GrowingCurve(recent=8, older=8), GrowingCurve(recent=8, older=8)
    for row in rows:
        one.append(*row.tolist())
    many.extend(rows)
    assert one.curve().mean.tolist() == many.curve().mean.tolist()


def test_a_copy_stays_what_it_was() -> None:
    growing = GrowingCurve(recent=4)
    growing.append(1, 0, 0.0, 1.0)
    before = growing.curve()
    for i in range(20):
        growing.append(i, 0, 0.0, 9.0)
    assert before.mean.tolist() == [1.0]


def test_halving_a_gap_keeps_what_is_known() -> None:
    found = halve(curve([1.0, np.nan, np.nan, np.nan]))
    assert found.mean[0] == 1.0
    assert np.isnan(found.mean[1])


def test_smoothing_has_no_bias_at_its_start_and_keeps_gaps() -> None:
    values = curve([4.0, 4.0, np.nan, 4.0, np.inf, 4.0])
    found = smooth(values, 0.9)
    assert found[[0, 1, 3, 5]] == pytest.approx([4.0] * 4)
    assert np.isnan(found[[2, 4]]).all()
    assert smooth(values, 0.0) is values.mean


def test_smoothing_lags_behind_a_step_as_its_weight_says() -> None:
    assert smooth(curve([0.0] * 50 + [1.0]), 0.9)[-1] == pytest.approx(0.1, rel=0.02)


def test_a_merged_point_counts_as_many_values_in_the_smoothing() -> None:
    values = curve([0.0] * 64 + [1.0] * 16)
    merged = concatenate(
        [halve(halve(select_points(values, slice(0, 64)))), select_points(values, slice(64, None))]
    )
    assert len(merged) == 32
    assert smooth(merged, 0.9)[-1] == pytest.approx(smooth(values, 0.9)[-1], rel=1e-6)


@pytest.mark.parametrize("weight", [0.3, 0.9, 0.995])
def test_smoothing_is_that_of_one_value_after_the_other(weight: float) -> None:
    random = np.random.default_rng(0)
    values = np.where(random.random(3000) < 0.1, np.nan, random.normal(5, 1, 3000))
    counts = np.repeat([4096.0, 64.0, 1.0], 1000)
    expected, average, norm = [], 0.0, 0.0
    for value, keep in zip(values, weight**counts, strict=True):
        if np.isfinite(value):
            average = keep * average + (1 - keep) * value
            norm = keep * norm + (1 - keep)
        expected.append(average / norm if np.isfinite(value) else np.nan)
    smoothed = smooth(replace(curve(values), count=counts), weight)
    np.testing.assert_allclose(smoothed, expected, rtol=1e-12)


def test_a_part_in_detail_replaces_only_what_is_coarser() -> None:
    coarse = halve(halve(curve(np.arange(64.0))))
    fine = select_points(curve(np.arange(64.0)), slice(16, 32))
    found = splice(coarse, fine)
    assert len(found) == 4 + 16 + 8
    assert found.count.sum() == 64
    assert splice(found, select_points(coarse, slice(4, 8))) is found
    assert splice(coarse, empty_curve()) is coarse


def test_places_on_an_axis_of_epochs() -> None:
    reference = curve(np.zeros(30), per_epoch=10)
    places = epoch_positions(np.array([5.0, 10.0, 20.0, 25.0, 30.0]), reference, None)
    assert places.tolist() == pytest.approx([0.5, 1.0, 2.0, 2.5, 3.0])
    one = curve(np.zeros(5), per_epoch=10)
    assert epoch_positions(np.array([5.0]), one, 10.0).tolist() == pytest.approx([0.5])


def test_a_stored_rate_is_a_ratio_of_sums() -> None:
    # Alternating short and long steps: a mean of ratios would say 133 samples a second.
    found = throughput_curve(curve([100.0] * 400), curve([0.5, 1.5] * 200))
    assert found.mean[10:] == pytest.approx([100.0] * (len(found) - 10), rel=0.06)


def fold_of(*ranks: list[Record]) -> FoldState:
    state = FoldState()
    for rank, records in enumerate(ranks):
        state = fold(state, rank, records)
    return state


def test_a_stored_rate_is_the_figure_that_the_fold_gives() -> None:
    lengths = [0.1 + 0.05 * (i % 5) for i in range(300)]
    ends = np.cumsum(lengths)
    records = [step(i + 1, float(t), step_s=lengths[i]) for i, t in enumerate(ends)]
    stored = throughput_curve(curve([32.0] * 300), curve(lengths))
    figure = fold_of(records).ranks[0].samples_per_s
    assert stored.mean[-1] == pytest.approx(figure, rel=0.03)


def test_a_total_is_made_only_when_every_rank_has_a_rate() -> None:
    book = ThroughputHistory()
    book.add(fold_of(steps(20, 0.1)), [0, 1])
    assert book.curves() == {}
    both = fold_of(steps(20, 0.1), steps(20, 0.1, samples=64))
    book.add(both, [0, 1])
    book.add(both, [0, 1])
    rates = book.curves()
    assert rates[None].mean.tolist() == pytest.approx([320 + 640])
    assert rates[None].steps.tolist() == [20]
    assert rates[0].mean.tolist() == pytest.approx([320])
    assert rates[1].mean.tolist() == pytest.approx([640])


def test_a_book_keeps_stored_points_up_to_the_first_live_one() -> None:
    book = MetricHistory()
    book.load({"loss": curve([5, 4, 3, 2])})
    book.curves(["loss"])
    version = book.version
    book.add("loss", 3, 0, 0.0, 30.0)
    assert book.version > version
    assert book.curves(["loss"])["loss"].mean.tolist() == [5, 4, 30]
    book.forget_live()
    assert book.curves(["loss"])["loss"].mean.tolist() == [5, 4, 3, 2]


def test_a_loss_that_comes_as_a_metric_wins_over_that_of_the_steps() -> None:
    """On a GPU the loss is sent once it has been copied; the row of its step says NaN."""
    rows = np.full((4, len(StepField)), np.nan)
    rows[:, StepField.GLOBAL_STEP] = [1, 2, 3, 4]
    rows[:, StepField.LR] = 0.1
    book = MetricHistory()
    book.add_steps(rows)
    assert book.keys() == {"step/lr"}
    for number in (1, 2):
        book.add("train/loss", number, 0, 0.0, 0.5)
    book.add_steps(rows)
    assert book.curves(["train/loss"])["train/loss"].mean.tolist() == [0.5, 0.5]
    # On a processor the row has it, and NaN in it is a loss that is not a number.
    plain = MetricHistory()
    rows[:2, StepField.LOSS] = 2.0
    plain.add_steps(rows)
    assert np.isnan(plain.curves(["train/loss"])["train/loss"].mean).tolist() == [0, 0, 1, 1]


def test_a_metric_without_an_epoch_is_drawn() -> None:
    """A program without a Trainer has no epochs that ltui knows."""
    curves = RunCurves(LatestCurveRequest())
    label = {"names": ["loss"], "step": 3, "epoch": None, "t": 1000.0}
    curves.add_records([labelled(RecordKind.METRICS, label, [0.5])])
    loss = curves.requested()["loss"]
    assert (loss.steps.tolist(), loss.mean.tolist()) == ([3], [0.5])
    assert np.isnan(loss.epochs).all()


def test_a_run_that_is_watched_from_its_start_keeps_its_whole_curves() -> None:
    """The first screens are drawn before any metric exists, so nothing is requested then."""
    curves = RunCurves(LatestCurveRequest())
    assert curves.is_complete()
    for number in range(1, 1001):
        label = {"names": ["train/loss"], "step": number, "epoch": 0, "t": 1000.0}
        curves.add_records([labelled(RecordKind.METRICS, label, [0.5])])
        curves.is_complete()
    assert curves.requested()["train/loss"].steps.tolist() == [*range(1, 1001)]
