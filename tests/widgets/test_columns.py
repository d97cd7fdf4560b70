"""Which columns fit, and cells cut to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ltui.widgets.columns import (
    Column,
    bar_cells,
    changed_columns,
    fit_columns,
    pad_or_cut,
    row_line,
    scrolled_columns,
    step_strip,
    strip,
    title_line,
)
from ltui.widgets.run_tables import GpuTable, RankTable
from ltui.widgets.view_models import Cell
from tests.widgets.board import RANKS

RANK_COLUMNS = tuple(RankTable().columns_of(RANKS))
"""All columns of the rank table, with those of metrics."""
COLUMNS = (
    Column(key="a", title="a", width=4, right=True),
    Column(key="b", title="b", width=10, importance=2),
    Column(key="c", title="c", width=6, grows=True),
)


def bar(share: float | None, width: int) -> str:
    return "".join(cell.text for cell in bar_cells(share, width))


def test_the_least_important_column_goes_first() -> None:
    assert [p.column.key for p in fit_columns(COLUMNS, 24)] == ["a", "b", "c"]
    assert [p.column.key for p in fit_columns(COLUMNS, 23)] == ["a", "c"]
    assert [p.column.key for p in fit_columns(COLUMNS, 1)] == ["a"]
    # A growing column takes the rest.
    assert fit_columns(COLUMNS, 50)[-1].width == 50 - 4 - 10 - 4


@pytest.mark.parametrize("columns", [RANK_COLUMNS, GpuTable.COLUMNS])
@given(width=st.integers(1, 250))
def test_columns_never_overlap_nor_leave_the_table(columns: tuple[Column, ...], width: int) -> None:
    placed = fit_columns(columns, width)
    end = 0
    for place in placed:
        assert place.x >= end
        end = place.x + place.width
    assert end <= max(width, placed[0].width)


WIDE = tuple(Column(key=key, title=key, width=8) for key in "abcdef")


@given(width=st.integers(20, 80), scrolled=st.integers(0, 9))
def test_every_column_can_be_scrolled_to_and_hidden_ones_are_counted(
    width: int, scrolled: int
) -> None:
    shown = scrolled_columns(WIDE, width, scrolled)
    keys = [place.column.key for place in shown.placed]
    assert keys == ["a", *"bcdef"[shown.left : shown.left + len(keys) - 1]]
    assert shown.left + shown.right + len(keys) == len(WIDE)
    assert shown.left <= scrolled
    assert scrolled_columns(WIDE, width, 9).right == 0
    assert shown.placed[-1].x + shown.placed[-1].width <= width


def test_cells_that_are_left_go_to_columns_that_would_be_cut() -> None:
    columns = (WIDE[0], Column(key="b", title="b", width=8, full=20), WIDE[2])
    widths = [place.width for place in scrolled_columns(columns, 34, 0).placed]
    assert widths == [8, 14, 8]
    widths = [place.width for place in scrolled_columns(columns, 99, 0).placed]
    assert widths == [8, 20, 8]


@pytest.mark.parametrize(("room", "widths"), [(7, [8, 8, 7]), (6, [8, 8, 6]), (5, [8, 8])])
def test_the_last_column_is_cut_before_it_is_omitted(room: int, widths: list[int]) -> None:
    columns = (WIDE[0], WIDE[1], Column(key="c", title="c", width=20, least=6))
    shown = scrolled_columns(columns, 8 + 2 + 8 + 2 + room, 0)
    assert [place.width for place in shown.placed] == widths
    assert shown.right == len(columns) - len(widths)


def test_state_and_step_are_always_there() -> None:
    for width in (60, 80, 120, 160):
        keys = {p.column.key for p in fit_columns(RANK_COLUMNS, width)}
        assert {"rank", "step", "phase", "age", "state"} <= keys


@given(st.text(max_size=40), st.integers(1, 30))
def test_a_cell_is_exactly_as_wide_as_its_column(text: str, width: int) -> None:
    place = fit_columns((Column(key="a", title="", width=width),), width)[0]
    assert sum(cell_len(c.text) for c in pad_or_cut((Cell(text=text),), place)) == width


def test_numbers_stand_at_the_right_and_long_text_ends_in_an_ellipsis() -> None:
    placed = fit_columns(COLUMNS, 24)
    row = {"a": (Cell(text="12"),), "b": (Cell(text="x" * 30),)}
    assert "".join(c.text for c in row_line(row, placed)) == "  12  " + "x" * 9 + "…" + " " * 8
    assert "".join(c.text for c in title_line(placed)).startswith("   a  b")


def test_only_changed_columns_are_named() -> None:
    placed = fit_columns(COLUMNS, 24)
    old = {"a": (Cell(text="1"),), "b": (Cell(text="x"),)}
    new = {"a": (Cell(text="2"),), "b": (Cell(text="x"),)}
    assert [p.column.key for p in changed_columns(old, new, placed)] == ["a"]


@given(st.floats(0, 1), st.integers(1, 40))
def test_a_bar_has_its_width_and_tells_some_from_none_and_all(share: float, width: int) -> None:
    text = bar(share, width)
    assert len(text) == width
    assert (text == "━" * width) == (share == 1)
    assert (text == "┈" * width) == (share == 0)


def test_bars_of_unknown_and_odd_numbers() -> None:
    assert bar(None, 5) == "     "
    assert bar(float("nan"), 5) == "     "
    assert bar(7.0, 4) == "━━━━"
    assert bar(-1.0, 4) == "┈┈┈┈"
    assert bar(0.5, 5) == "━━╸┈┈"
    assert len(bar_cells(0.3, 10)) == 2


def test_strips_show_the_newest_on_the_right_and_gaps() -> None:
    assert strip((0.0, 0.5, 1.0), 5, high=1.0) == "  ▁▄▇"
    assert strip((1.0, float("nan"), 1.0), 3) == "▇ ▇"
    assert strip(range(100), 4, high=99.0) == "▇▇▇▇"
    assert strip((), 3) == "   "
    assert strip((0.0, 0.0), 2) == "▁▁"
    assert strip((1.0,), 0) == ""


def test_a_slow_step_stands_out_of_level_ones() -> None:
    assert step_strip((0.1,) * 7 + (5.0,), 8) == "▁▁▁▁▁▁▁▇"
    level = step_strip((0.10, 0.11, 0.10, 0.12), 4)
    assert set(level) <= {"▂", "▃"}
    assert step_strip((), 4) == "    "
    assert step_strip((0.0, 0.0), 2) == "▁▁"
