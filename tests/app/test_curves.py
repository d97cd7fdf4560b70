"""Arithmetic on curves."""

from __future__ import annotations

import numpy as np
import pytest
from frames import curve

from ltui.app.curves import GrowingCurve, empty_curve, epoch_places, halve, join, rate_curve, smooth
from ltui.app.history import CurveBook, RateBook
from ltui.training.queue.records import StepField


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


def test_growing_past_its_bound_halves_and_keeps_extremes() -> None:
    growing = GrowingCurve(max_points=8)
    for i in range(9):
        growing.append(i, 0, float(i), float(i % 2))
    found = growing.curve()
    assert len(found) == 5
    assert found.steps.tolist() == [1, 3, 5, 7, 8]
    assert found.mean[:4].tolist() == [0.5] * 4
    assert found.low[:4].tolist() == [0.0] * 4
    assert found.high[:4].tolist() == [1.0] * 4


def test_a_copy_stays_what_it_was() -> None:
    growing = GrowingCurve(max_points=4)
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
    values = np.array([4.0, 4.0, np.nan, 4.0, np.inf, 4.0])
    found = smooth(values, 0.9)
    assert found[[0, 1, 3, 5]] == pytest.approx([4.0] * 4)
    assert np.isnan(found[[2, 4]]).all()
    assert smooth(values, 0.0) is values


def test_smoothing_lags_behind_a_step_as_its_weight_says() -> None:
    values = np.array([0.0] * 50 + [1.0])
    assert smooth(values, 0.9)[-1] == pytest.approx(0.1, rel=0.02)


def test_places_on_an_axis_of_epochs() -> None:
    reference = curve(np.zeros(30), per_epoch=10)
    places = epoch_places(np.array([5.0, 10.0, 20.0, 25.0, 30.0]), reference, None)
    assert places.tolist() == pytest.approx([0.5, 1.0, 2.0, 2.5, 3.0])
    one = curve(np.zeros(5), per_epoch=10)
    assert epoch_places(np.array([5.0]), one, 10.0).tolist() == pytest.approx([0.5])


def test_a_stored_rate_is_a_ratio_of_sums() -> None:
    # Alternating short and long steps: a mean of ratios would say 133 samples a second.
    seconds = curve([0.5, 1.5] * 200, step_s=1.0)
    samples = curve([100.0, 100.0] * 200, step_s=1.0)
    found = rate_curve(samples, seconds, points=4)
    assert 3 <= len(found) <= 6
    assert found.mean[:4] == pytest.approx([100.0] * 4, rel=0.03)


def step_row(
    step: int, *, samples: float = 10, step_s: float = 0.3, fetch_s: float = 0.1
) -> np.ndarray:
    row = np.full(len(StepField), np.nan)
    row[StepField.GLOBAL_STEP] = step
    row[StepField.EPOCH] = 0
    row[StepField.SAMPLES] = samples
    row[StepField.STEP_S] = step_s
    row[StepField.FETCH_S] = fetch_s
    row[StepField.WALL_S] = 100.0 + step
    return row


def test_a_total_is_made_only_of_steps_that_every_rank_did() -> None:
    book = RateBook()
    for step in (1, 2, 3):
        book.add(0, step_row(step))
    book.settle([0, 1])
    assert book.rates() == {}
    for step in (1, 2):
        book.add(1, step_row(step, samples=20))
    book.settle([0, 1])
    rates = book.rates()
    assert rates[None].mean.tolist() == pytest.approx([(20 + 40) / 0.6])
    assert rates[None].steps.tolist() == [2]
    assert rates[0].mean.tolist() == pytest.approx([20 / 0.6])
    waits = book.waits()
    assert waits is not None
    assert waits.mean.tolist() == pytest.approx([1 / 3])


def test_a_book_keeps_stored_points_up_to_the_first_live_one() -> None:
    book = CurveBook()
    book.load({"loss": curve([5, 4, 3, 2])})
    version = book.version
    book.add("loss", 3, 0, 0.0, 30.0)
    assert book.version > version
    assert book.curves()["loss"].mean.tolist() == [5, 4, 30]
    book.forget_live()
    assert book.curves()["loss"].mean.tolist() == [5, 4, 3, 2]
