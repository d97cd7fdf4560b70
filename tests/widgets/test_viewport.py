"""Zoom, pan, and following the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.widgets.charts.axis_scale import (
    AxisRange,
    Viewport,
    pan_viewport,
    visible_range,
    zoom_viewport,
)

DATA = AxisRange(0.0, 1000.0)


def test_all_of_it_holds_the_data() -> None:
    whole = visible_range(None, AxisRange(1.0, 1234.0))
    assert whole.low == 0.0
    assert 1234.0 <= whole.high <= 1400.0


def test_zoom_keeps_what_is_under_the_pointer() -> None:
    before = visible_range(None, DATA)
    view = zoom_viewport(None, DATA, 0.25, 2.0)
    assert view is not None
    after = visible_range(view, DATA)
    assert after.span == pytest.approx(before.span / 2)
    assert after.low + 0.25 * after.span == pytest.approx(before.low + 0.25 * before.span)
    assert not view.follow


def test_zoom_at_the_right_edge_follows_the_tail() -> None:
    view = zoom_viewport(None, DATA, 1.0, 4.0)
    assert view is not None
    assert view.follow
    grown = visible_range(view, AxisRange(0.0, 2000.0))
    assert grown.low <= 2000.0 <= grown.high
    assert grown.span == pytest.approx(250.0)


def test_a_window_inside_stays_where_it_is() -> None:
    view = Viewport(low=100.0, high=200.0)
    assert visible_range(view, AxisRange(0.0, 5000.0)) == AxisRange(100.0, 200.0)


def test_zooming_out_ends_at_all_of_it() -> None:
    view = zoom_viewport(None, DATA, 0.5, 2.0)
    for _ in range(3):
        view = zoom_viewport(view, DATA, 0.5, 0.5)
    assert view is None


def test_pan_stops_at_the_ends() -> None:
    view: Viewport | None = Viewport(low=400.0, high=600.0)
    for _ in range(20):
        view = pan_viewport(view, DATA, -0.25)
    assert view == Viewport(low=0.0, high=200.0)
    for _ in range(20):
        view = pan_viewport(view, DATA, 0.25)
    assert view is not None
    assert view.follow
    assert visible_range(view, DATA).high >= 1000.0
    assert pan_viewport(None, DATA, 0.25) is None


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.floats(-1, 1)), max_size=30))
def test_a_window_is_never_empty_nor_before_the_data(
    moves: list[tuple[bool, float, float]],
) -> None:
    view: Viewport | None = None
    for zoom, anchor, share in moves:
        if zoom:
            view = zoom_viewport(view, DATA, anchor, 1.5 if share > 0 else 1 / 1.5)
        else:
            view = pan_viewport(view, DATA, share)
        now = visible_range(view, DATA)
        assert now.span > 0
        assert now.low >= -1e-6
        assert now.low < DATA.high
