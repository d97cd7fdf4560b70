"""The grid of one cell for each rank."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ltui.app.presentation.rank_grid import CellGrid, GridGroup, LegendEntry, Mark, grid_lines
from ltui.widgets.columns import Cells
from ltui.widgets.tone import Tone

OK, BAD = Mark("▁", Tone.DIM, 1), Mark("!", Tone.BAD, 9)
LEGEND = (LegendEntry("!", "1 STALLED", Tone.BAD), LegendEntry("▁▇", "step time"))


def grid(*sizes: int, bad: int | None = None) -> CellGrid:
    groups, first = [], 0
    for size in sizes:
        numbers = range(first, first + size)
        groups.append(
            GridGroup([f"r{n}" for n in numbers], [BAD if n == bad else OK for n in numbers])
        )
        first += size
    return CellGrid(tuple(groups), LEGEND)


def texts(lines: list[Cells]) -> list[str]:
    return ["".join(cell.text for cell in line) for line in lines]


def test_machines_are_separated_and_lines_begin_with_the_first_rank() -> None:
    assert texts(grid_lines(grid(4, 4, 4, bad=6), 10, 14)) == [
        "! 1 STALLED",
        "▁▇ step time",
        " r0 ▁▁▁▁ ▁▁!▁",
        " r8 ▁▁▁▁",
    ]


def test_cells_are_dense_if_machines_do_not_fit_with_gaps() -> None:
    assert texts(grid_lines(grid(4, 4, 4, bad=6), 2, 40))[-1] == " r0 ▁▁▁▁ ▁▁!▁ ▁▁▁▁"
    assert texts(grid_lines(grid(4, 4, 4, bad=6), 3, 17))[-1] == " r0 ▁▁▁▁▁▁!▁▁▁▁▁"


def test_neighbours_share_a_cell_with_the_worst_mark_if_there_are_too_many() -> None:
    lines = texts(grid_lines(grid(8, 8, bad=13), 3, 16))
    assert lines[-1] == " r0 ▁▁▁▁ ▁▁!▁"
    assert "1 cell: worst of 2 ranks" in " ".join(lines)


def test_machines_of_different_sizes_are_aligned() -> None:
    lines = texts(grid_lines(grid(2, 4, 4, 4), 6, 13))
    assert lines[-2:] == [" r0 ▁▁   ▁▁▁▁", " r6 ▁▁▁▁ ▁▁▁▁"]


def test_a_machine_wider_than_the_screen_takes_several_lines() -> None:
    lines = texts(grid_lines(grid(20), 10, 12))
    assert [line.strip() for line in lines[-3:]] == ["r0 ▁▁▁▁▁▁▁▁", "r8 ▁▁▁▁▁▁▁▁", "r16 ▁▁▁▁"]


def test_an_empty_grid_has_no_lines() -> None:
    assert grid_lines(grid(), 5, 40) == []
    assert grid_lines(grid(0, 0), 5, 40) == []
    assert grid_lines(grid(4), 0, 40) == []


def test_the_legend_takes_two_lines_at_most() -> None:
    entries = tuple(LegendEntry("x", f"meaning {n}") for n in range(9))
    lines = texts(grid_lines(CellGrid(grid(3).groups, entries), 6, 24))
    assert lines[:-1] == ["x meaning 0", "x meaning 1"]


@pytest.mark.parametrize("width", [20, 60, 80, 160])
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=60), most_lines=st.integers(1, 20))
def test_lines_always_fit(width: int, sizes: list[int], most_lines: int) -> None:
    lines = texts(grid_lines(grid(*sizes), most_lines, width))
    cells = [line for line in lines if not re.search("step time|STALLED|worst", line)]
    assert len(lines) <= most_lines
    assert bool(cells) == any(sizes)
    assert all(cell_len(line) <= max(width, 30) for line in lines)


def test_machines_share_cells_if_there_are_more_of_them_than_cells() -> None:
    lines = texts(grid_lines(grid(*[2] * 40, bad=70), 3, 16))
    assert lines[-1] == " r0 ▁▁▁▁▁▁▁▁!▁"
    assert lines[0] == "1 cell: worst of 8 ranks"
