"""Whole charts as text, without an app."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.widgets.charts.axis_scale import Viewport
from ltui.widgets.charts.canvas import Canvas, changed_spans
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.picture import Area, Label, picture
from ltui.widgets.charts.plot import plot
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel


def curve(name: str = "train", count: int = 100, colour: int = 0, **more: object) -> ChartSeries:
    x = np.arange(count, dtype=np.float64)
    return ChartSeries(name=name, x=x, y=2.0 - x / count, colour=colour, **more)  # type: ignore[arg-type]


def chart_of(*series: ChartSeries, **more: object) -> ChartViewModel:
    return ChartViewModel(title="loss", series=series, **more)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 300), st.booleans())
def test_draws_at_every_size(width: int, height: int, count: int, log_y: bool) -> None:
    drawn = plot(chart_of(curve(count=count)), ChartOptions(log_y=log_y, cursor=3.0), width, height)
    assert drawn.canvas.chars.shape == (height, width)


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (200, 60)])
def test_axes_legend_and_curve_are_there(size: tuple[int, int]) -> None:
    text = plot(chart_of(curve()), ChartOptions(), *size).canvas.text()
    assert any(0x2800 < ord(letter) < 0x2900 for letter in text)
    assert "1" in text
    if size[1] >= 6:
        assert "train 1.010" in text
        assert "step" in text


def test_an_empty_chart_says_why() -> None:
    nothing = chart_of(note="no validation yet")
    assert "no validation yet" in plot(nothing, ChartOptions(), 60, 10).canvas.text()
    assert "loading" in plot(None, ChartOptions(), 60, 10).canvas.text()
    gaps = ChartSeries(name="a", x=np.arange(3.0), y=np.full(3, np.nan))
    assert "no values yet" in plot(chart_of(gaps), ChartOptions(), 60, 10).canvas.text()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("log_y", [True, False])
def test_the_largest_values_of_a_float_are_drawn(sign: float, log_y: bool) -> None:
    largest = np.finfo(np.float64).max
    y = np.where(np.arange(300) % 2, largest, sign * largest)
    series = ChartSeries(name="a", x=np.arange(300.0), y=y, low=y, high=y)
    canvas = plot(chart_of(series), ChartOptions(log_y=log_y), 80, 20).canvas
    assert any(0x2800 < ord(letter) < 0x2900 for letter in canvas.text())


def test_the_log_scale_leaves_out_what_is_not_positive() -> None:
    y = np.array([100.0, 0.0, 1.0, -5.0, 0.01])
    drawn = plot(
        chart_of(ChartSeries(name="a", x=np.arange(5.0), y=y)), ChartOptions(log_y=True), 80, 20
    )
    assert drawn.y is not None
    assert drawn.y.low <= -2
    assert drawn.y.high >= 2
    none = plot(
        chart_of(ChartSeries(name="a", x=np.arange(5.0), y=-np.ones(5))),
        ChartOptions(log_y=True),
        80,
        20,
    )
    assert "log scale" in none.canvas.text()


def test_the_axis_stays_while_the_curve_grows_within_it() -> None:
    before = plot(chart_of(curve(count=1000)), ChartOptions(), 100, 20)
    after = plot(chart_of(curve(count=1001)), ChartOptions(), 100, 20, before.y)
    assert after.y is before.y
    assert after.x == before.x
    cells = sum(last - first for _, first, last in changed_spans(before.canvas, after.canvas))
    assert cells < 200


def test_the_read_out_gives_the_values_under_the_crosshair() -> None:
    two = chart_of(curve(), curve("validation", colour=1))
    text = plot(two, ChartOptions(cursor=50.0), 100, 20).canvas.text()
    assert "step 50" in text
    assert text.count("1.500") == 2
    assert "│" in text


def test_a_value_that_is_not_a_number_is_shown_as_nan() -> None:
    y = np.ones(10)
    y[-1] = np.nan
    logged = ChartSeries(name="a", x=np.arange(10.0), y=y, is_logged=True)
    assert "a NaN" in plot(chart_of(logged), ChartOptions(), 80, 12).canvas.line(0)
    empty = ChartSeries(name="a", x=np.arange(10.0), y=np.full(10, np.nan))
    assert "a n/a" in plot(chart_of(empty, curve("b")), ChartOptions(), 80, 12).canvas.line(0)


def test_the_value_is_at_the_end_of_a_curve_where_it_covers_nothing() -> None:
    x = np.arange(4000.0)
    falling = chart_of(ChartSeries(name="loss", x=x, y=1.01 + np.exp(-x / 200)))
    lines = plot(falling, ChartOptions(), 80, 20).canvas.text().splitlines()
    end = next(row for row, line in enumerate(lines) if row and "●" in line)
    assert lines[end - 1].rstrip().endswith(" 1.010")
    noise = ChartSeries(name="noise", x=x, y=np.where(x == x[-1], 0.125, np.sin(x**2)))
    for view_model, options, height in (
        (falling, ChartOptions(), 6),
        (chart_of(noise), ChartOptions(), 20),
    ):
        text = plot(view_model, options, 80, height).canvas.text()
        assert text.count("1.010") + text.count("0.1250") == 1
    at_cursor = plot(falling, ChartOptions(cursor=50.0), 80, 20).canvas.text()
    assert "1.010" not in at_cursor


def test_raw_values_are_thin_and_the_grid_has_gaps() -> None:
    x = np.arange(4000.0)
    noise = ChartSeries(name="raw", x=x, y=np.sin(x**2), dim=True)
    thin = plot(chart_of(noise), ChartOptions(), 80, 20).canvas
    full = plot(chart_of(replace(noise, dim=False)), ChartOptions(), 80, 20).canvas
    drawn = [
        sum(letter.bit_count() for letter in canvas.chars.flat if 0x2800 < letter < 0x2900)
        for canvas in (thin, full)
    ]
    assert drawn[0] < drawn[1] / 2
    grid = plot(chart_of(curve()), ChartOptions(), 80, 20).canvas.text()
    assert "┈" in grid
    assert "┈┈" not in grid


def test_a_gap_under_the_crosshair_is_not_a_number() -> None:
    y = np.ones(10)
    y[5] = np.nan
    gap = ChartSeries(name="a", x=np.arange(10.0), y=y)
    for series, text in ((gap, "a n/a"), (replace(gap, is_logged=True), "a NaN")):
        assert text in plot(chart_of(series), ChartOptions(cursor=5.0), 80, 12).canvas.text()


def test_curves_differ_without_colour() -> None:
    series = [curve(f"s{n}", colour=n) for n in range(4)]
    legend = plot(chart_of(*series), ChartOptions(dashes=True), 120, 20).canvas.line(0)
    assert [legend[legend.index(f"s{n}") - 2] for n in range(4)] == list("●■▲◆")
    ends = plot(chart_of(series[2]), ChartOptions(), 60, 12).canvas.text().split("\n", 1)[1]
    assert "▲" in ends


def test_names_without_room_are_shortened_and_entries_without_room_are_counted() -> None:
    series = [curve(f"a-rather-long-name-{n}", colour=n) for n in range(6)]
    legend = plot(chart_of(*series), ChartOptions(), 70, 20).canvas.line(0)
    shown = legend.count("…")
    assert 0 < shown < 6
    assert legend.count("1.010") == shown
    assert f"+{6 - shown}" in legend
    assert all(f"-{n} 1.010" in legend for n in range(shown))


def test_two_curves_keep_names_and_values_in_fifty_columns() -> None:
    raw = curve("train/loss raw", dim=True)
    two = chart_of(raw, curve("train/loss smoothed"), curve("validation/loss", colour=1))
    legend = plot(two, ChartOptions(), 50, 20).canvas.line(0)
    assert legend.count("1.010") == 2
    assert "train" in legend
    assert "vali" in legend
    assert "+" not in legend


def test_a_name_loses_its_suffix_before_it_is_cut() -> None:
    both = chart_of(*(curve(f"{n}/loss smoothed", suffix=" smoothed") for n in ("train", "val")))
    assert "train/loss smoothed 1.010" in plot(both, ChartOptions(), 70, 20).canvas.line(0)
    legend = plot(both, ChartOptions(), 45, 20).canvas.line(0)
    assert "train/loss 1.010" in legend
    assert "val/loss 1.010" in legend


def test_faint_curves_leave_the_legend_first() -> None:
    both = chart_of(curve("raw", dim=True), curve("train"), curve("validation", colour=1))
    legend = plot(both, ChartOptions(), 45, 20).canvas.line(0)
    assert "train" in legend
    assert "validation" in legend
    assert "raw" in plot(both, ChartOptions(), 80, 20).canvas.line(0)


def test_under_the_crosshair_values_matter_more_than_names() -> None:
    three = chart_of(*(curve(f"a-rather-long-name-{n}", colour=n) for n in range(3)))
    legend = plot(three, ChartOptions(cursor=50.0), 60, 20).canvas.line(0)
    assert legend.count("1.500") == 3
    assert "name" not in legend


def test_a_name_of_wide_letters_keeps_the_line_as_wide() -> None:
    canvas = plot(chart_of(curve("損失")), ChartOptions(), 60, 12).canvas
    assert "損失 1.010" in canvas.line(0)
    assert len(canvas.line(0)) == 58


def test_the_extremes_of_windows_fit_into_the_axis() -> None:
    series = curve(low=np.full(100, -3.0), high=np.full(100, 9.0))
    drawn = plot(chart_of(series), ChartOptions(), 80, 20)
    assert drawn.y is not None
    assert drawn.y.low <= -3.0
    assert drawn.y.high >= 9.0


def test_a_view_shows_its_part_alone() -> None:
    drawn = plot(
        chart_of(curve(count=1000)), ChartOptions(view=Viewport(low=100.0, high=200.0)), 80, 20
    )
    assert drawn.x is not None
    assert (drawn.x.low, drawn.x.high) == (100.0, 200.0)
    assert drawn.y is not None
    assert drawn.y.span < 0.5


def test_a_million_points_lose_no_peak() -> None:
    y = np.zeros(1_000_000)
    y[333_333] = 7.0
    drawn = plot(chart_of(ChartSeries(name="a", x=np.arange(1e6), y=y)), ChartOptions(), 80, 20)
    assert drawn.y is not None
    assert drawn.y.high >= 7.0


def test_only_what_differs_is_a_change() -> None:
    old, new = Canvas(10, 3), Canvas(10, 3)
    assert changed_spans(old, new) == []
    new.write(2, 1, "abc")
    new.write(9, 2, "z", 1)
    assert changed_spans(old, new) == [(1, 2, 5), (2, 9, 10)]


def decay(count: int = 1000) -> ChartSeries:
    x = np.arange(count, dtype=np.float64)
    y = 2.5 * np.exp(-x / 10) + 0.05 + 0.02 * np.sin(x)
    return ChartSeries(name="loss", x=x, y=y)


def test_the_first_steps_do_not_flatten_a_curve_and_the_chart_says_so() -> None:
    robust = plot(chart_of(decay(), cut_outliers=True), ChartOptions(), 100, 20)
    assert robust.y is not None
    assert robust.y.high < 0.5
    first, *curves = robust.canvas.text().splitlines()
    assert "highest 2.550 (o shows all)" in first
    assert "cut" not in "".join(curves), "the note is not on the curves"
    narrow = plot(chart_of(decay(), cut_outliers=True), ChartOptions(), 40, 20)
    assert narrow.canvas.text().splitlines()[-1].strip().startswith("cut ")
    whole = plot(chart_of(decay(), cut_outliers=True), ChartOptions(outliers=True), 100, 20)
    assert whole.y is not None
    assert whole.y.high >= 2.5
    assert "cut" not in whole.canvas.text()
    assert "cut" not in plot(chart_of(decay()), ChartOptions(), 100, 20).canvas.text()


def test_the_newest_value_and_rare_changes_are_never_cut() -> None:
    rising = decay()
    rising.y[-1] = 9.0
    drawn = plot(chart_of(rising, cut_outliers=True), ChartOptions(), 100, 20)
    assert drawn.y is not None
    assert drawn.y.high >= 9.0
    # A learning rate that dropped only at the end.
    y = np.full(1000, 0.1)
    y[980:] = 0.01
    drop = plot(
        chart_of(ChartSeries(name="lr", x=np.arange(1000.0), y=y), cut_outliers=True),
        ChartOptions(),
        80,
        9,
    )
    assert drop.y is not None
    assert drop.y.low <= 0.01
    assert drop.y.high >= 0.1


def test_rounding_errors_are_no_cliff_and_labels_differ() -> None:
    y = 3200.0 + 1e-4 * np.arange(2.0).repeat(50)
    flat = plot(chart_of(ChartSeries(name="a", x=np.arange(100.0), y=y)), ChartOptions(), 80, 20)
    assert flat.y is not None
    assert flat.y.span > 100
    # Small differences that are real keep their digits.
    y = 3200.0 + 1e-2 * np.arange(100.0) / 100
    text = plot(
        chart_of(ChartSeries(name="a", x=np.arange(100.0), y=y)), ChartOptions(), 80, 20
    ).canvas.text()
    labels = [line.split("┈")[0].strip() for line in text.splitlines() if "┈" in line]
    assert len(set(labels)) == len(labels) > 2
    assert all(len(label) >= 8 for label in labels)


def test_many_signs_without_lines_are_left_out_and_lines_stay() -> None:
    epochs = tuple(ChartMark(at=n, sign="╵", text=f"epoch {n}") for n in range(1, 99))
    stall = ChartMark(at=50.0, sign="!", text="stalled", line=True)
    saved = ChartMark(at=20.0, sign="◆", text="checkpoint")
    marks = (*epochs, stall, saved)
    text = plot(chart_of(curve(), marks=marks), ChartOptions(), 80, 12).canvas.text()
    assert "╵" not in text
    assert "◆" in text, "few checkpoints are no crowd"
    assert "!" in text
    assert "┊" in text
    at_an_epoch = ChartMark(at=21.0, sign="◆", text="checkpoint")
    marks = (at_an_epoch, *epochs[::20])
    few = plot(chart_of(curve(), marks=marks), ChartOptions(), 80, 12).canvas.text()
    assert (few.count("╵"), few.count("◆")) == (4, 1)


def test_a_scale_that_the_chart_chose_is_named() -> None:
    falling = chart_of(curve(), log_y=True)
    first = plot(falling, ChartOptions(log_y=True), 80, 12).canvas.line(0)
    assert "log scale (y: switch to linear)" in first
    chosen = plot(chart_of(curve()), ChartOptions(log_y=True), 80, 12)
    assert "switch" not in chosen.canvas.text()


def test_a_rate_begins_at_zero_until_somebody_zooms() -> None:
    rate = ChartSeries(name="total", x=np.arange(100.0), y=3300.0 + np.arange(100.0))
    whole = plot(chart_of(rate, is_rate=True), ChartOptions(), 80, 12)
    assert whole.y is not None
    assert whole.y.low == 0
    part = ChartOptions(view=Viewport(low=50, high=60))
    zoomed = plot(chart_of(rate, is_rate=True), part, 80, 12)
    assert zoomed.y is not None
    assert zoomed.y.low > 3000


def test_the_axis_of_an_ended_run_ends_with_its_data() -> None:
    ended = plot(chart_of(curve(count=153), x_is_final=True), ChartOptions(), 80, 12)
    assert ended.x is not None
    assert ended.x.high == 152


def test_an_axis_that_cuts_goes_on_while_the_curve_changes_a_little() -> None:
    # The outlier is 2.6 times, then 2 times as high as the rest of the axis.
    ranges, before = [], None
    for outlier in (3.4, 2.4):
        y = np.linspace(0.0, 1.0, 200)
        y[20] = outlier
        series = ChartSeries(name="loss", x=np.arange(200.0), y=y)
        drawn = plot(chart_of(series, cut_outliers=True), ChartOptions(), 100, 20, before)
        before = drawn.y
        ranges.append(drawn.y)
    assert all(y is not None and y.is_cut for y in ranges)


def test_the_marks_of_a_picture_differ_and_have_a_legend() -> None:
    saved = ChartMark(at=20.0, sign="◆", text="checkpoint of step 20", kind="checkpoint")
    epoch = ChartMark(at=50.0, sign="╵", text="epoch 2 begins", kind="epoch")
    drawn = picture(chart_of(curve(), marks=(saved, epoch)), ChartOptions())
    texts = [item.text for item in drawn.items if isinstance(item, Label)]
    assert texts[-2:] == ["checkpoint", "epoch"]
    assert sum(isinstance(item, Area) and len(item.points) == 4 for item in drawn.items) == 2
