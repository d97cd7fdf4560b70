"""Axes: round, calm, labelled."""

from __future__ import annotations

import math
import time
from datetime import datetime

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ltui.widgets.charts.axis_scale import (
    AxisRange,
    Viewport,
    growing_end,
    linear_ticks,
    log_ticks,
    nice_step,
    pan_viewport,
    sticky_log_range,
    sticky_range,
    tick_label,
    time_label,
    visible_range,
    zoom_viewport,
)
from ltui.widgets.formats import THIN
from tests.required import required


@given(st.floats(1e-12, 1e12), st.integers(1, 20))
def test_steps_are_round_and_few(span: float, parts: int) -> None:
    step = nice_step(span, parts)
    mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-6
    assert span / step <= parts * (1 + 1e-6)


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_a_range_holds_its_data_and_wastes_little(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    assume(high - low > 1e-6 * max(1.0, abs(high), abs(low)))
    found = sticky_range(low, high, None)
    assert found.low <= low + 1e-6 * (high - low)
    assert found.high >= high - 1e-6 * (high - low)
    assert found.span <= 1.5 * (high - low)


def test_a_range_stays_while_the_data_fits_and_fills_it() -> None:
    first = sticky_range(0.3, 2.3, None)
    assert sticky_range(0.25, 2.2, first) is first
    assert sticky_range(0.25, 2.9, first) != first
    assert sticky_range(0.3, 0.4, first) != first


def test_one_value_gets_a_range_around_it() -> None:
    for value in (0.0, 5.0, -3.0, 1e-30):
        found = sticky_range(value, value, None)
        assert found.low < found.high
        assert found.low <= value <= found.high


def test_the_end_of_a_growing_axis_moves_seldom() -> None:
    ends = {growing_end(0.0, float(n)) for n in range(1000, 1200)}
    assert len(ends) <= 3
    assert all(growing_end(0.0, float(n)) >= n for n in range(1, 2000))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 10))
def test_ticks_lie_inside_and_differ(low: float, span: float, most: int) -> None:
    assume(span > 1e-9 * abs(low))
    ticks = linear_ticks(AxisRange(low, low + span), most)
    assert len(ticks) <= most + 1
    slack = 1e-6 * span + 1e-9 * abs(low)
    assert all(low - slack <= t.at <= low + span + slack for t in ticks)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_a_scale_has_two_ticks(low: float, span: float, most: int) -> None:
    assume(span > 1e-6 * abs(low))
    assert len(linear_ticks(AxisRange(low, low + span), most)) >= 2


def test_labels_of_one_axis_differ() -> None:
    for low, high in (
        (0.0, 1.0), (0.91, 0.93), (0.0, 1e7), (0.0, 3e-5), (11_000, 13_000), (1.0, 1.00001),
        (3200, 3200.02), (26_990, 27_010), (1e6, 1e6 + 7), (0.00098, 0.00102),
    ):  # fmt: skip
        labels = [t.label for t in linear_ticks(AxisRange(low, high), 6)]
        assert len(set(labels)) == len(labels)
        assert labels


def test_labels_read_well() -> None:
    for value, step, label in (
        *((0.25, 0.05, "0.25"), (1200, 200, "1 200"), (20_000, 10_000, "20 k")),
        *((0, 5, "0"), (2e-5, 1e-5, "2e-05")),
    ):
        assert tick_label(value, step).replace(THIN, " ") == label
    for seconds, label in (
        *((1800, "30 m"), (5400, "1 h 30 m"), (0, "0 s"), (5, "5 s"), (86400, "1 d")),
    ):
        assert time_label(seconds) == label


def test_ticks_of_steps_are_whole_and_plain() -> None:
    places = [t.at for t in linear_ticks(AxisRange(4517.2, 4520.4), 6, whole=True)]
    assert places == [4518, 4519, 4520]
    labels = [
        t.label.replace(THIN, " ") for t in linear_ticks(AxisRange(26_990, 27_010), 5, whole=True)
    ]
    assert labels == ["26 990", "26 995", "27 000", "27 005", "27 010"]


def test_log_ticks_show_decades_or_what_lies_between() -> None:
    assert [t.label for t in log_ticks(AxisRange(-2, 1), 4)] == ["0.01", "0.1", "1", "10"]
    few = [t.label for t in log_ticks(AxisRange(math.log10(0.3), math.log10(2.4)), 4)]
    assert few == ["0.5", "1", "2"]
    assert len(log_ticks(AxisRange(-12, 6), 4)) <= 6
    assert log_ticks(AxisRange(math.log10(0.31), math.log10(0.34)), 4)


def test_a_log_axis_has_the_decades_of_its_data_and_labels_of_one_form() -> None:
    within = sticky_log_range(math.log10(2e-8), math.log10(3), None)
    assert (10**within.low, 10**within.high) == pytest.approx((2e-8, 5))
    assert sticky_log_range(math.log10(3e-8), math.log10(3), within) is within
    assert sticky_log_range(math.log10(1e-6), math.log10(3), within) != within
    labels = [t.label for t in log_ticks(within, 5)]
    assert labels == ["1e-07", "1e-05", "1e-03", "1e-01"]


def test_time_ticks_are_clock_steps() -> None:
    labels = [t.label for t in linear_ticks(AxisRange(0, 9000), 6, time=True)]
    assert labels == ["0 s", "30 m", "1 h", "1 h 30 m", "2 h", "2 h 30 m"]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/St_Johns"])
def test_clock_ticks_are_at_round_local_times(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        ticks = linear_ticks(AxisRange(1_800_000_123.0, 1_800_009_000.0), 6, clock=True)
        assert 2 <= len(ticks) <= 7
        for tick in ticks:
            local = datetime.fromtimestamp(tick.at)
            assert local.strftime("%H:%M") == tick.label
            assert local.minute % 15 == local.second == 0
    finally:
        monkeypatch.undo()
        time.tzset()


DATA = AxisRange(0.0, 1000.0)


def test_all_of_it_holds_the_data() -> None:
    whole = visible_range(None, AxisRange(1.0, 1234.0))
    assert whole.low == 0.0
    assert 1234.0 <= whole.high <= 1400.0


def test_zoom_keeps_what_is_under_the_pointer_and_follows_the_tail_at_the_right_edge() -> None:
    before = visible_range(None, DATA)
    view = required(zoom_viewport(None, DATA, 0.25, 2.0))
    after = visible_range(view, DATA)
    assert after.span == pytest.approx(before.span / 2)
    assert after.low + 0.25 * after.span == pytest.approx(before.low + 0.25 * before.span)
    assert not view.follow
    view = required(zoom_viewport(None, DATA, 1.0, 4.0))
    assert view.follow
    grown = visible_range(view, AxisRange(0.0, 2000.0))
    assert grown.low <= 2000.0 <= grown.high
    assert grown.span == pytest.approx(250.0)


def test_zooming_out_ends_at_all_of_it() -> None:
    view = zoom_viewport(None, DATA, 0.5, 2.0)
    for _ in range(3):
        view = zoom_viewport(view, DATA, 0.5, 0.5)
    assert view is None


def test_pan_stops_at_the_ends_and_a_window_inside_stays_where_it_is() -> None:
    inside = Viewport(low=100.0, high=200.0)
    assert visible_range(inside, AxisRange(0.0, 5000.0)) == AxisRange(100.0, 200.0)
    view: Viewport | None = Viewport(low=400.0, high=600.0)
    for _ in range(20):
        view = pan_viewport(view, DATA, -0.25)
    assert view == Viewport(low=0.0, high=200.0)
    for _ in range(20):
        view = pan_viewport(view, DATA, 0.25)
    assert required(view).follow
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
