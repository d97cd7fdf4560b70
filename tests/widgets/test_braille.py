"""Curves as dots: nothing lost, nothing invented."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ltui.widgets.charts import braille
from ltui.widgets.view_models import FloatArray

VALUES = hnp.arrays(
    np.float64,
    st.integers(1, 400),
    elements=st.one_of(
        st.floats(-1e6, 1e6), st.just(float("nan")), st.just(float("inf")), st.just(-float("inf"))
    ),
)


def places(y: FloatArray) -> FloatArray:
    return np.arange(y.size, dtype=np.float64)


def dots(codes: braille.IntArray) -> braille.BoolArray:
    """The mask that a block of braille stands for."""
    height, width = codes.shape
    mask = np.zeros((4 * height, 2 * width), dtype=bool)
    for (row, column), bit in np.ndenumerate(braille._DOTS):
        mask[row::4, column::2] = (codes - braille.BLANK) & bit != 0
    return mask


@given(VALUES, st.integers(1, 80))
def test_decimation_keeps_the_extremes(y: FloatArray, columns: int) -> None:
    found = braille.decimate(places(y), y, 0.0, max(1.0, y.size - 1.0), columns)
    finite = y[np.isfinite(y)]
    if finite.size:
        assert np.nanmin(found.low) == finite.min()
        assert np.nanmax(found.high) == finite.max()
    else:
        assert not np.isfinite(found.low).any()
    assert found.at.size <= columns + 2


@given(VALUES, st.integers(1, 80))
def test_a_positive_scale_leaves_out_the_rest(y: FloatArray, columns: int) -> None:
    found = braille.decimate(places(y), y, 0.0, max(1.0, y.size - 1.0), columns, positive=True)
    finite = y[np.isfinite(y) & (y > 0)]
    assert not (found.low <= 0).any()
    if finite.size:
        assert np.nanmin(found.low) == finite.min()


@given(VALUES, st.integers(1, 40), st.integers(1, 12))
def test_every_value_has_its_dot_and_dots_stay_between_values(
    y: FloatArray, width: int, height: int
) -> None:
    finite = y[np.isfinite(y)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    if high - low < 1e-6:
        high = low + 1.0
    curve = braille.decimate(places(y), y, 0.0, max(1.0, y.size - 1.0), 2 * width)
    mask = dots(braille.line(curve, low, high, width, height))
    assert mask.shape == (4 * height, 2 * width)
    for at, bottom, top in zip(curve.at, curve.low, curve.high, strict=True):
        if np.isfinite(bottom):
            rows = braille.rows_of(np.array([top, bottom]), low, high, 4 * height).astype(int)
            assert mask[rows[0], int(at)]
            assert mask[rows[1], int(at)]
    if not finite.size:
        assert not mask.any()


def test_a_straight_line_has_no_hole() -> None:
    x = np.array([0.0, 100.0])
    curve = braille.decimate(x, x, 0.0, 100.0, 40)
    mask = dots(braille.line(curve, 0.0, 100.0, 20, 10))
    assert mask.any(axis=0).all()
    rows = [np.flatnonzero(mask[:, column]) for column in range(40)]
    for left, right in pairwise(rows):
        assert left.min() - right.max() <= 1


def drawn_columns(codes: braille.IntArray) -> braille.BoolArray:
    """Return which columns of dots have a dot."""
    return np.asarray(dots(codes).any(axis=0))


def test_a_gap_stays_open() -> None:
    x = np.arange(100.0)
    y = np.full(100, 5.0)
    y[40:60] = np.nan
    curve = braille.decimate(x, y, 0.0, 99.0, 100)
    drawn = drawn_columns(braille.line(curve, 0.0, 10.0, 50, 5))
    assert drawn[:40].all()
    assert not drawn[41:59].any()
    assert drawn[61:].all()


def test_sparse_points_are_joined_but_not_over_a_gap() -> None:
    x = np.array([0.0, 30.0, 60.0, 90.0])
    y = np.array([1.0, 2.0, np.nan, 2.0])
    curve = braille.decimate(x, y, 0.0, 90.0, 90)
    drawn = drawn_columns(braille.line(curve, 0.0, 3.0, 45, 5))
    assert drawn[:30].all()
    assert not drawn[33:88].any()
    assert drawn[89]


def test_the_line_runs_out_of_a_window_inside_the_data() -> None:
    x = np.array([0.0, 50.0, 100.0])
    curve = braille.decimate(x, x, 20.0, 30.0, 40)
    drawn = dots(braille.line(curve, 0.0, 100.0, 20, 10)).any(axis=0)
    assert drawn.all()


def test_values_outside_the_range_are_not_drawn_at_its_edges() -> None:
    x = np.arange(10.0)
    curve = braille.decimate(x, np.full(10, 50.0), 0.0, 9.0, 20)
    assert not dots(braille.line(curve, 0.0, 10.0, 10, 5)).any()


def test_a_band_lies_between_its_curves() -> None:
    x = np.arange(50.0)
    low, high = np.full(50, 2.0), np.full(50, 8.0)
    cells = braille.band(
        braille.decimate(x, low, 0.0, 49.0, 100), braille.decimate(x, high, 0.0, 49.0, 100),
        0.0, 10.0, 50, 10,
    )  # fmt: skip
    rows = np.flatnonzero(dots(cells).any(axis=1))
    assert rows.min() >= 7
    assert rows.max() <= 32


def test_packing_sets_every_dot_once() -> None:
    assert braille.pack(np.ones((4, 2), dtype=bool)).tolist() == [[0x28FF]]
    assert braille.pack(np.zeros((4, 2), dtype=bool)).tolist() == [[braille.BLANK]]
