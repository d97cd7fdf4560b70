"""Whole charts as text, without an app."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.widgets.charts.axis_scale import AxisRange, Viewport
from ltui.widgets.charts.canvas import Canvas, changed_spans
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.picture import Area, Label, picture
from ltui.widgets.charts.plot import Plot, plot
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel, FloatArray
from tests.required import required

SIZE = (80, 20)


def line(y: FloatArray, name: str = "a", **more: Any) -> ChartSeries:
    """Return a curve with these values at 0, 1, 2 and so on."""
    return ChartSeries(name=name, x=np.arange(float(len(y))), y=y, **more)


def curve(name: str = "train", count: int = 100, colour: int = 0, **more: Any) -> ChartSeries:
    return line(2.0 - np.arange(float(count)) / max(1, count), name, colour=colour, **more)


def chart_of(*series: ChartSeries, **more: Any) -> ChartViewModel:
    return ChartViewModel(title="loss", series=series, **more)


def drawn(chart: ChartViewModel | None, size: tuple[int, int] = SIZE, **options: Any) -> Plot:
    return plot(chart, ChartOptions(**options), *size)


def text_of(chart: ChartViewModel | None, size: tuple[int, int] = SIZE, **options: Any) -> str:
    return drawn(chart, size, **options).canvas.text()


def legend_of(chart: ChartViewModel, width: int, height: int = 20, **options: Any) -> str:
    return drawn(chart, (width, height), **options).canvas.line(0)


def y_axis(chart: ChartViewModel, size: tuple[int, int] = SIZE, **options: Any) -> AxisRange:
    return required(drawn(chart, size, **options).y)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 300), st.booleans())
def test_draws_at_every_size(width: int, height: int, count: int, log_y: bool) -> None:
    plotted = drawn(chart_of(curve(count=count)), (width, height), log_y=log_y, cursor=3.0)
    assert plotted.canvas.chars.shape == (height, width)


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (200, 60)])
def test_axes_legend_and_curve_are_there(size: tuple[int, int]) -> None:
    text = text_of(chart_of(curve()), size)
    assert any(0x2800 < ord(letter) < 0x2900 for letter in text)
    assert "1" in text
    if size[1] >= 6:
        assert "train 1.010" in text
        assert "step" in text


def test_an_empty_chart_says_why() -> None:
    assert "no validation yet" in text_of(chart_of(note="no validation yet"))
    assert "loading" in text_of(None)
    assert "no values yet" in text_of(chart_of(line(np.full(3, np.nan))))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("log_y", [True, False])
def test_the_largest_values_of_a_float_are_drawn(sign: float, log_y: bool) -> None:
    largest = np.finfo(np.float64).max
    y = np.where(np.arange(300) % 2, largest, sign * largest)
    text = text_of(chart_of(line(y, low=y, high=y)), log_y=log_y)
    assert any(0x2800 < ord(letter) < 0x2900 for letter in text)


def test_the_log_scale_leaves_out_what_is_not_positive() -> None:
    axis = y_axis(chart_of(line(np.array([100.0, 0.0, 1.0, -5.0, 0.01]))), log_y=True)
    assert axis.low <= -2
    assert axis.high >= 2
    assert "log scale" in text_of(chart_of(line(-np.ones(5))), log_y=True)


def test_the_axis_stays_while_the_curve_grows_within_it() -> None:
    before = drawn(chart_of(curve(count=1000)), (100, 20))
    after = plot(chart_of(curve(count=1001)), ChartOptions(), 100, 20, before.y)
    assert after.y is before.y
    assert after.x == before.x
    cells = sum(last - first for _, first, last in changed_spans(before.canvas, after.canvas))
    assert cells < 200


def test_the_read_out_gives_the_values_under_the_crosshair() -> None:
    text = text_of(chart_of(curve(), curve("validation", colour=1)), (100, 20), cursor=50.0)
    assert "step 50" in text
    assert text.count("1.500") == 2
    assert "│" in text


def test_a_value_that_is_not_a_number_is_shown_as_nan() -> None:
    y = np.ones(10)
    y[[5, -1]] = np.nan
    logged, empty = line(y, is_logged=True), line(np.full(10, np.nan))
    assert "a NaN" in legend_of(chart_of(logged), 80, 12)
    assert "a n/a" in legend_of(chart_of(empty, curve("b")), 80, 12)
    # So is one under the crosshair; a gap of what is not logged is none.
    for series, text in ((logged, "a NaN"), (replace(logged, is_logged=False), "a n/a")):
        assert text in text_of(chart_of(series), cursor=5.0)


def test_the_value_is_at_the_end_of_a_curve_where_it_covers_nothing() -> None:
    x = np.arange(4000.0)
    falling = chart_of(line(1.01 + np.exp(-x / 200), "loss"))
    lines = text_of(falling).splitlines()
    end = next(row for row, line in enumerate(lines) if row and "●" in line)
    assert lines[end - 1].rstrip().endswith(" 1.010")
    noise = chart_of(line(np.where(x == x[-1], 0.125, np.sin(x**2)), "noise"))
    for view_model, height in ((falling, 6), (noise, 20)):
        text = text_of(view_model, (80, height))
        assert text.count("1.010") + text.count("0.1250") == 1
    assert "1.010" not in text_of(falling, cursor=50.0)


def test_raw_values_are_thin_and_the_grid_has_gaps() -> None:
    noise = line(np.sin(np.arange(4000.0) ** 2), "raw", dim=True)
    thin, full = (drawn(chart_of(one)).canvas for one in (noise, replace(noise, dim=False)))
    dots = [
        sum(letter.bit_count() for letter in canvas.chars.flat if 0x2800 < letter < 0x2900)
        for canvas in (thin, full)
    ]
    assert dots[0] < dots[1] / 2
    grid = text_of(chart_of(curve()))
    assert "┈" in grid
    assert "┈┈" not in grid


def test_curves_differ_without_colour() -> None:
    series = [curve(f"s{n}", colour=n) for n in range(4)]
    legend = legend_of(chart_of(*series), 120, dashes=True)
    assert [legend[legend.index(f"s{n}") - 2] for n in range(4)] == list("●■▲▼")
    assert "▲" in text_of(chart_of(series[2]), (60, 12)).split("\n", 1)[1]


def test_names_without_room_are_shortened_and_entries_without_room_are_counted() -> None:
    series = [curve(f"a-rather-long-name-{n}", colour=n) for n in range(6)]
    legend = legend_of(chart_of(*series), 70)
    shown = legend.count("…")
    assert 0 < shown < 6
    assert legend.count("1.010") == shown
    assert f"+{6 - shown}" in legend
    assert all(f"-{n} 1.010" in legend for n in range(shown))
    # Under the crosshair values matter more than names.
    legend = legend_of(chart_of(*series[:3]), 60, cursor=50.0)
    assert legend.count("1.500") == 3
    assert "name" not in legend


def test_two_curves_keep_names_and_values_in_fifty_columns() -> None:
    raw = curve("train/loss raw", dim=True)
    two = chart_of(raw, curve("train/loss smoothed"), curve("validation/loss", colour=1))
    legend = legend_of(two, 50)
    assert legend.count("1.010") == 2
    assert "train" in legend
    assert "vali" in legend
    assert "+" not in legend


def test_a_name_loses_its_suffix_before_it_is_cut_and_faint_curves_leave_first() -> None:
    both = chart_of(*(curve(f"{n}/loss smoothed", suffix=" smoothed") for n in ("train", "val")))
    assert "train/loss smoothed 1.010" in legend_of(both, 70)
    legend = legend_of(both, 45)
    assert "train/loss 1.010" in legend
    assert "val/loss 1.010" in legend
    three = chart_of(curve("raw", dim=True), curve("train"), curve("validation", colour=1))
    legend = legend_of(three, 45)
    assert "train" in legend
    assert "validation" in legend
    assert "raw" in legend_of(three, 80)


def test_a_name_of_wide_letters_keeps_the_line_as_wide() -> None:
    legend = legend_of(chart_of(curve("損失")), 60, 12)
    assert "損失 1.010" in legend
    assert len(legend) == 58


def test_the_extremes_of_windows_and_of_a_million_points_fit_into_the_axis() -> None:
    axis = y_axis(chart_of(curve(low=np.full(100, -3.0), high=np.full(100, 9.0))))
    assert axis.low <= -3.0
    assert axis.high >= 9.0
    y = np.zeros(1_000_000)
    y[333_333] = 7.0
    assert y_axis(chart_of(line(y))).high >= 7.0


def test_a_view_shows_its_part_alone_and_an_ended_run_all_of_its_steps() -> None:
    part = drawn(chart_of(curve(count=1000)), view=Viewport(low=100.0, high=200.0))
    assert (required(part.x).low, required(part.x).high) == (100.0, 200.0)
    assert required(part.y).span < 0.5
    assert required(drawn(chart_of(curve(count=153), x_is_final=True)).x).high == 152


def test_only_what_differs_is_a_change() -> None:
    old, new = Canvas(10, 3), Canvas(10, 3)
    assert changed_spans(old, new) == []
    new.write(2, 1, "abc")
    new.write(9, 2, "z", 1)
    assert changed_spans(old, new) == [(1, 2, 5), (2, 9, 10)]


def decay() -> ChartSeries:
    x = np.arange(1000.0)
    return line(2.5 * np.exp(-x / 10) + 0.05 + 0.02 * np.sin(x), "loss")


def test_the_first_steps_do_not_flatten_a_curve_and_the_chart_says_so() -> None:
    robust = drawn(chart_of(decay(), cut_outliers=True), (100, 20))
    assert required(robust.y).high < 0.5
    first, *curves = robust.canvas.text().splitlines()
    assert "highest 2.550 (o shows all)" in first
    assert "cut" not in "".join(curves), "the note is not on the curves"
    narrow = text_of(chart_of(decay(), cut_outliers=True), (40, 20))
    assert narrow.splitlines()[-1].strip().startswith("cut ")
    whole = drawn(chart_of(decay(), cut_outliers=True), (100, 20), outliers=True)
    assert required(whole.y).high >= 2.5
    assert "cut" not in whole.canvas.text()
    assert "cut" not in text_of(chart_of(decay()), (100, 20))


def test_the_newest_value_and_rare_changes_are_never_cut() -> None:
    rising = decay()
    rising.y[-1] = 9.0
    assert y_axis(chart_of(rising, cut_outliers=True), (100, 20)).high >= 9.0
    # A learning rate that dropped only at the end.
    y = np.full(1000, 0.1)
    y[980:] = 0.01
    axis = y_axis(chart_of(line(y, "lr"), cut_outliers=True), (80, 9))
    assert axis.low <= 0.01
    assert axis.high >= 0.1


def test_rounding_errors_are_no_cliff_and_labels_differ() -> None:
    assert y_axis(chart_of(line(3200.0 + 1e-4 * np.arange(2.0).repeat(50)))).span > 100
    # Small differences that are real keep their digits.
    text = text_of(chart_of(line(3200.0 + 1e-2 * np.arange(100.0) / 100)))
    labels = [line.split("┈")[0].strip() for line in text.splitlines() if "┈" in line]
    assert len(set(labels)) == len(labels) > 2
    assert all(len(label) >= 8 for label in labels)


def test_many_signs_without_lines_are_left_out_and_lines_stay() -> None:
    epochs = tuple(ChartMark(at=n, sign="╵", text=f"epoch {n}") for n in range(1, 99))
    stall = ChartMark(at=50.0, sign="!", text="stalled", line=True)
    saved = ChartMark(at=20.0, sign="◆", text="checkpoint")
    text = text_of(chart_of(curve(), marks=(*epochs, stall, saved)), (80, 12))
    assert "╵" not in text
    assert "◆" in text, "few checkpoints are no crowd"
    assert "!" in text
    assert "┊" in text
    at_an_epoch = ChartMark(at=21.0, sign="◆", text="checkpoint")
    few = text_of(chart_of(curve(), marks=(at_an_epoch, *epochs[::20])), (80, 12))
    assert (few.count("╵"), few.count("◆")) == (4, 1)


def test_a_scale_that_the_chart_chose_is_named() -> None:
    falling = chart_of(curve(), log_y=True)
    assert "log scale (y: switch to linear)" in legend_of(falling, 80, 12, log_y=True)
    assert "switch" not in text_of(chart_of(curve()), (80, 12), log_y=True)


def test_a_rate_begins_at_zero_until_somebody_zooms() -> None:
    rate = chart_of(line(3300.0 + np.arange(100.0), "total"), is_rate=True)
    assert y_axis(rate).low == 0
    assert y_axis(rate, view=Viewport(low=50, high=60)).low > 3000


def test_an_axis_that_cuts_goes_on_while_the_curve_changes_a_little() -> None:
    # The outlier is 2.6 times, then 2 times as high as the rest of the axis.
    before = None
    for outlier in (3.4, 2.4):
        y = np.linspace(0.0, 1.0, 200)
        y[20] = outlier
        chart = chart_of(line(y, "loss"), cut_outliers=True)
        before = required(plot(chart, ChartOptions(), 100, 20, before).y)
        assert before.is_cut


def test_the_marks_of_a_picture_differ_and_have_a_legend() -> None:
    saved = ChartMark(at=20.0, sign="◆", text="checkpoint of step 20", kind="checkpoint")
    epoch = ChartMark(at=50.0, sign="╵", text="epoch 2 begins", kind="epoch")
    shown = picture(chart_of(curve(), marks=(saved, epoch)), ChartOptions())
    texts = [item.text for item in shown.items if isinstance(item, Label)]
    assert texts[-2:] == ["checkpoint", "epoch"]
    assert sum(isinstance(item, Area) and len(item.points) == 4 for item in shown.items) == 2
