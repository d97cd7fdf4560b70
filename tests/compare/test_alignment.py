"""Alignment and bands against NumPy and SciPy, also with gaps, infinities and other lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from ltui.app.compare.alignment import (
    BANDS,
    Clock,
    Line,
    align,
    band_of,
    common_positions,
    line_of,
    positions_of,
    t_quantile,
    values_at,
)
from ltui.training.store.curve_reader import Curve, FloatArray, to_curve

VALUES = st.floats(-1e6, 1e6)
GAPPY = st.one_of(VALUES, st.just(math.nan))


@st.composite
def lines(draw: st.DrawFn, values: st.SearchStrategy[float] = VALUES) -> Line:
    x = sorted(draw(st.sets(st.integers(0, 500), min_size=1, max_size=30)))
    y = draw(st.lists(values, min_size=len(x), max_size=len(x)))
    return Line(np.array(x, dtype=float), np.array(y, dtype=float))


tables = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 8), st.integers(1, 6)),
    elements=st.one_of(VALUES, st.sampled_from([math.nan, math.inf, -math.inf])),
)


@given(lines(), st.lists(st.floats(-10, 510), min_size=1))
def test_values_between_points_are_those_of_numpy(line: Line, positions: list[float]) -> None:
    at = np.array(positions)
    expected = np.interp(at, line.x, line.y, left=np.nan, right=np.nan)
    np.testing.assert_allclose(values_at(line, at), expected, rtol=1e-9, atol=1e-6)


@given(lines(GAPPY))
def test_points_keep_their_values_and_gaps_stay_gaps(line: Line) -> None:
    np.testing.assert_array_equal(values_at(line, line.x), line.y)
    middles = (line.x[:-1] + line.x[1:]) / 2
    known = np.isfinite(line.y[:-1]) & np.isfinite(line.y[1:])
    np.testing.assert_array_equal(np.isfinite(values_at(line, middles)), known)


@given(st.lists(lines(GAPPY), min_size=1, max_size=6))
def test_runs_of_other_lengths_and_spacings_share_positions(some: list[Line]) -> None:
    positions = common_positions(some)
    table = align(some, positions)
    assert table.shape == (len(some), len(positions))
    for line, row in zip(some, table, strict=True):
        outside = (positions < line.x[0]) | (positions > line.x[-1])
        assert np.isnan(row[outside]).all()
        places = np.searchsorted(positions, line.x)
        np.testing.assert_array_equal(row[places], line.y)


@given(st.lists(lines(), min_size=1, max_size=4), st.integers(2, 20))
def test_positions_are_limited_and_keep_both_ends(some: list[Line], most: int) -> None:
    every = np.unique(np.concatenate([line.x for line in some]))
    positions = common_positions(some, most)
    assert len(positions) <= most
    assert set(positions) <= set(every)
    assert (positions[0], positions[-1]) == (every[0], every[-1])


@given(tables)
def test_bands_are_those_of_numpy_and_scipy(table: FloatArray) -> None:
    for kind in BANDS:
        band = band_of(table, kind)
        for column in range(table.shape[1]):
            values = table[:, column]
            values = values[np.isfinite(values)]
            result = (band.mean[column], band.low[column], band.high[column])
            assert band.count[column] == len(values)
            np.testing.assert_allclose(result, _expected(values, kind), rtol=1e-6, atol=1e-6)


def _expected(values: FloatArray, kind: str) -> tuple[float, float, float]:
    n = len(values)
    if n == 0:
        return (math.nan,) * 3
    mean = float(values.mean())
    if kind == "minmax":
        return mean, float(values.min()), float(values.max())
    if n == 1:
        return mean, math.nan, math.nan
    half = float(values.std(ddof=1))
    if kind != "std":
        half /= math.sqrt(n)
    if kind == "ci95":
        half *= float(stats.t.ppf(0.975, n - 1))
    return mean, mean - half, mean + half


def test_the_mean_of_huge_values_is_finite() -> None:
    with np.errstate(all="raise"):
        band = band_of(np.array([[1.5e308], [1e308]]), "minmax")
    assert (band.mean[0], band.low[0], band.high[0]) == (1.25e308, 1e308, 1.5e308)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 200])
def test_the_quantile_of_students_distribution(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def _curve(points: list[tuple[float, float, float, float]]) -> Curve:
    return to_curve([(*point, point[3], point[3], 1.0) for point in points])


def test_time_leaves_out_what_passed_between_attempts() -> None:
    curve = _curve([(1, 0, 1010, 5), (2, 0, 1020, 4), (3, 0, 5010, 3)])
    clock = Clock(attempts=((1000, 1030), (5000, None)))
    assert positions_of(curve, "time", clock=clock).tolist() == [10, 20, 40]
    assert positions_of(curve, "time", clock=Clock()).tolist() == [0, 10, 4000]


def test_infinite_values_become_gaps_and_points_without_a_position_are_left_out() -> None:
    curve = _curve([(1, 0, 10, 5), (2, 0, math.nan, 4), (3, 0, 30, math.inf)])
    line = line_of(positions_of(curve, "time", clock=Clock()), curve.mean)
    assert line.x.tolist() == [0, 20]
    np.testing.assert_array_equal(line.y, [5, np.nan])


ANY = st.one_of(VALUES, st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308]))


@given(st.lists(st.tuples(ANY, ANY), max_size=40))
def test_a_line_has_every_point_with_a_position_in_order(points: list[tuple[float, float]]) -> None:
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    line = line_of(x, y)
    placed = sorted((at, n) for n, at in enumerate(x.tolist()) if math.isfinite(at))
    assert line.x.tolist() == [at for at, _ in placed]
    expected = [y[n] if math.isfinite(y[n]) else math.nan for _, n in placed]
    np.testing.assert_array_equal(line.y, expected)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6))
def test_training_time_is_the_time_inside_the_attempts(spans: list[tuple[int, int]]) -> None:
    attempts, now, moments, expected, trained = [], 1000.0, [], [], 0.0
    for number, (lasted, waited) in enumerate(spans):
        is_last = number == len(spans) - 1
        attempts.append((now, None if is_last else now + lasted))
        # The last moment of an attempt is the first of the next one if there is no wait.
        for share in (0.0, 0.5):
            moments.append(now + share * lasted)
            expected.append(trained + share * lasted)
        now, trained = now + lasted + waited + 1, trained + lasted
    elapsed = Clock(attempts=tuple(attempts)).elapsed(np.array(moments))
    np.testing.assert_allclose(elapsed, expected, atol=1e-6)


@given(st.lists(lines(GAPPY), min_size=2, max_size=5), st.sampled_from(BANDS))
def test_the_band_of_aligned_runs_is_that_of_their_values(some: list[Line], kind: str) -> None:
    positions = common_positions(some)
    band = band_of(align(some, positions), kind)
    for place, position in enumerate(positions):
        values = [float(values_at(line, np.array([position]))[0]) for line in some]
        finite = np.array([value for value in values if math.isfinite(value)])
        result = (band.mean[place], band.low[place], band.high[place])
        assert band.count[place] == len(finite)
        np.testing.assert_allclose(result, _expected(finite, kind), rtol=1e-6, atol=1e-6)


@given(st.integers(2, 50), st.integers(2, 8))
def test_the_first_step_of_an_epoch_begins_it(per_epoch: int, epochs: int) -> None:
    assume(per_epoch > 1)
    rows = [(s, (s - 1) // per_epoch, float(s), 1.0) for s in range(1, per_epoch * epochs + 1)]
    curve = _curve([(float(s), float(e), t, v) for s, e, t, v in rows])
    x = positions_of(curve, "epoch", clock=Clock())
    np.testing.assert_allclose(x, curve.steps / per_epoch, rtol=1e-9)
