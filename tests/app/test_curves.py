"""Arithmetic on curves."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ltui.app.live.curve_arithmetic import (
    concatenate,
    empty_curve,
    epoch_positions,
    select_points,
    smooth,
    splice,
)
from ltui.training.store.curve_reader import merge_points
from tests.app.frames import curve


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
    first, rest = (select_points(values, part) for part in (slice(0, 64), slice(64, None)))
    merged = concatenate([merge_points(first, 16), rest])
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
    coarse = merge_points(curve(np.arange(64.0)), 16)
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
