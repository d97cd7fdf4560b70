"""Parallel coordinates as text, without an app."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from ltui.widgets.charts.chart_options import COLOURS, INK_SERIES
from ltui.widgets.charts.parallel_plot import (
    MIN_SPACING,
    ParallelAxis,
    ParallelLine,
    ParallelViewModel,
    nearest_line,
    parallel_plot,
)
from ltui.widgets.charts.picture import WIDTH, Label, Line, parallel_picture, svg

TICKS = ((0.0, "0.001"), (0.5, "0.01"), (1.0, "0.1"))


def view(axes: int = 3, lines: int = 2) -> ParallelViewModel:
    """Return lines that rise and fall in turn."""
    return ParallelViewModel(
        axes=tuple(ParallelAxis(title=f"axis-{n}", ticks=TICKS) for n in range(axes)),
        lines=tuple(
            ParallelLine(
                key=f"run-{n}",
                name=f"owl-{n}",
                colour=n,
                places=tuple(float((axis + n) % 2) for axis in range(axes)),
            )
            for n in range(lines)
        ),
    )


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.integers(0, 12),
    st.integers(0, 5),
    st.integers(-3, 20),
)
def test_draws_at_every_size(width: int, height: int, axes: int, lines: int, first: int) -> None:
    view_model = view(axes, lines)
    if axes:
        view_model = view_model.part(view_model.first_axis(first, width), width)
        assert len(view_model.axes) == 1 or len(view_model.axes) <= max(2, width // MIN_SPACING + 1)
    canvas = parallel_plot(view_model, width, height, highlighted=["run-1"], dashes=True)
    assert canvas.chars.shape == (height, width)


def test_titles_labels_and_signs_are_there() -> None:
    lines = parallel_plot(view(), 60, 12).text().splitlines()
    assert all(title in lines[0] for title in ("axis-0", "axis-1", "axis-2"))
    assert lines[1].count("0.1") == lines[-1].count("0.001") == 3
    # The signs of both runs are beside the last axis, at the values where they end.
    assert "●" in lines[-1]
    assert "■" in lines[1]


def test_the_highlighted_line_has_its_sign_on_every_axis_and_the_others_are_faint() -> None:
    canvas = parallel_plot(view(), 60, 12, highlighted=["run-1"])
    text = canvas.text()
    assert text.count("■") == 4
    assert text.count("●") == 1
    inks = set(canvas.ink.flatten().tolist())
    assert INK_SERIES + 1 in inks
    assert INK_SERIES + COLOURS in inks
    assert INK_SERIES not in inks


def test_without_colour_the_highlighted_line_alone_has_no_gaps() -> None:
    flat = ParallelViewModel(
        axes=view().axes,
        lines=tuple(
            ParallelLine(key=str(n), name=str(n), colour=n, places=(n / 4,) * 3) for n in (1, 2, 3)
        ),
    )
    lines = parallel_plot(flat, 60, 20, highlighted=["2"], dashes=True).text().splitlines()
    # Each line lies in a row of its own, between the first axis with its label and the second one.
    dots = [re.findall("[⠁-⣿⠀ ]", line[9:28]) for line in lines]
    drawn = [row.count("⠀") + row.count(" ") for row in dots if any(c > "⠀" for c in row)]
    assert [gaps > 0 for gaps in drawn] == [True, False, True]


def test_more_axes_than_fit_are_reached_and_arrows_say_where() -> None:
    whole = view(axes=9)
    titles = []
    for wanted in (-5, 2, 99):
        part = whole.part(whole.first_axis(wanted, 60), 60)
        titles.append(" ".join(axis.title.replace("axis-", "") for axis in part.axes))
    assert titles == ["0 1 2 3 ▸ 8", "◂ 2 3 4 5 ▸ 8", "◂ 4 5 6 7 8"]
    assert part.lines[0].places == (0.0, 1.0, 0.0, 1.0, 0.0)


def test_a_click_finds_the_line_that_is_nearest() -> None:
    assert nearest_line(view(), 60, 12, 1, 11) == "run-0"
    assert nearest_line(view(), 60, 12, 1, 1) == "run-1"
    assert nearest_line(view(axes=1), 60, 12, 1, 1) is None


def test_without_axes_or_lines_there_is_a_note() -> None:
    assert "no runs to show" in parallel_plot(view(lines=0), 60, 10).text()
    assert (
        "no setting differs"
        in parallel_plot(ParallelViewModel(note="no setting differs"), 60, 10).text()
    )


def test_the_picture_has_every_axis_label_and_name() -> None:
    drawn = parallel_picture(view(axes=9), "parameters, best loss", ["run-1"])
    texts = [item.text for item in drawn.items if isinstance(item, Label)]
    assert texts[:3] == ["parameters, best loss", "owl-0", "owl-1"]
    assert [text for text in texts if text.startswith("axis-")] == [f"axis-{n}" for n in range(9)]
    assert texts.count("0.001") == texts.count("0.1") == 9
    lines = [item for item in drawn.items if isinstance(item, Line) and len(item.points) == 9]
    assert [line.width for line in lines] == [1.8, 3.0]
    heights = [y for _, y in lines[0].points]
    # The first run is at the foot of the first axis and at the top of the second one.
    assert heights[0] == max(heights)
    assert heights[1] == min(heights)
    assert all(0 < x < WIDTH for line in lines for x, _ in line.points)
    ElementTree.fromstring(svg(drawn))


def test_a_picture_without_lines_has_the_note() -> None:
    drawn = parallel_picture(view(lines=0), "parameters")
    assert [item.text for item in drawn.items if isinstance(item, Label)][1] == "no runs to show"
