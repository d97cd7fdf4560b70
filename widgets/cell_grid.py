"""A grid with one cell for each of many ranks or GPUs, grouped by machine, with a legend. Pure.

A sign in each cell gives the state, so the grid can be read without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from msgspec import Struct
from rich.cells import cell_len

from ltui.widgets.columns import Cells
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

LEGEND_GAP = "   "
MAX_LEGEND_LINES = 2


class Mark(Struct, frozen=True):
    """The sign of a cell. If several ranks share a cell, it shows the mark of highest severity."""

    sign: str
    tone: Tone = Tone.PLAIN
    severity: int = 0


class GridGroup(Struct, frozen=True):
    """The cells of one machine, in order."""

    labels: Sequence[str]
    """The name of each cell. A line begins with the name of its first cell."""
    marks: Sequence[Mark]


class LegendEntry(Struct, frozen=True):
    """The meaning of a sign, such as ``! 1 STALLED``."""

    sign: str
    words: str
    tone: Tone = Tone.PLAIN


class CellGrid(Struct, frozen=True):
    """A grid and the meanings of the signs in it, the most important one first."""

    groups: tuple[GridGroup, ...]
    legend: tuple[LegendEntry, ...] = ()
    unit: str = "rank"
    """What a cell stands for, for the legend: ``1 cell: worst of 4 ranks``."""


def grid_lines(grid: CellGrid, most_lines: int, width: int) -> list[Cells]:
    """Return the legend and the cells, together in at most ``most_lines`` lines.

    There is always a line of cells. Machines are separated by a blank if all cells fit so. If there
    are too many cells, several neighbours of one machine share a cell.
    """
    if not any(group.marks for group in grid.groups) or most_lines < 1:
        return []
    label_width = max(cell_len(label) for group in grid.groups for label in group.labels) + 1
    room = max(1, width - label_width)
    all_groups, merged = [group for group in grid.groups if group.marks], 1
    while True:
        groups = [_merge(group, merged) for group in all_groups]
        legend = legend_lines(grid, merged, width)[: most_lines - 1]
        free = most_lines - len(legend)
        layouts = (_separated(groups, room), _aligned(groups, room), _dense(groups, room))
        lines = next((lines for lines in layouts if lines is not None and len(lines) <= free), None)
        if lines is not None:
            break
        if len(all_groups) > 1 and all(len(group.marks) == 1 for group in groups):
            # There are more machines than cells, so machines share cells too.
            all_groups, merged = [_join(all_groups)], 1
        else:
            merged *= 2
    drawn = legend
    for line in lines:
        label = next(label for label, mark in line if mark is not None)
        cells = [Cell(text=f"{label:>{label_width - 1}} ", tone=Tone.DIM)]
        for tone, run in groupby((mark for _, mark in line), key=_tone):
            text = "".join(" " if mark is None else mark.sign for mark in run)
            cells.append(Cell(text=text, tone=tone))
        drawn.append(tuple(cells))
    return drawn


def legend_lines(grid: CellGrid, merged: int, width: int) -> list[Cells]:
    """Return the legend in at most two lines; the last entries that do not fit are omitted."""
    entries = list(grid.legend)
    if merged > 1:
        words = f"1 cell: worst of {merged} {grid.unit}s"
        entries.insert(0, LegendEntry("", words, Tone.DIM))
    lines: list[list[Cell]] = [[]]
    used = 0
    for entry in entries:
        sign = f"{entry.sign} " if entry.sign else ""
        length = cell_len(sign) + cell_len(entry.words)
        if used and used + len(LEGEND_GAP) + length > width:
            if len(lines) == MAX_LEGEND_LINES:
                break
            lines.append([])
            used = 0
        if used:
            lines[-1].append(Cell(text=LEGEND_GAP))
            used += len(LEGEND_GAP)
        if sign:
            lines[-1].append(Cell(text=sign, tone=entry.tone))
        loud = entry.tone in (Tone.BAD, Tone.WARN)
        lines[-1].append(Cell(text=entry.words, tone=entry.tone if loud else Tone.DIM))
        used += length
    return [tuple(line) for line in lines if line]


_Line = list[tuple[str, Mark | None]]
"""Label and mark of each cell; None is a blank between two machines."""


def _tone(mark: Mark | None) -> Tone:
    return Tone.PLAIN if mark is None else mark.tone


def _merge(group: GridGroup, size: int) -> GridGroup:
    """Return the group with one cell for each ``size`` neighbours."""
    if size == 1:
        return group
    starts = range(0, len(group.marks), size)
    worst = attrgetter("severity")
    return GridGroup(
        [group.labels[start] for start in starts],
        [max(group.marks[start : start + size], key=worst) for start in starts],
    )


def _join(groups: Sequence[GridGroup]) -> GridGroup:
    labels = [label for group in groups for label in group.labels]
    return GridGroup(labels, [mark for group in groups for mark in group.marks])


def _separated(groups: Sequence[GridGroup], room: int) -> list[_Line] | None:
    """Return whole machines in lines, with blanks between them; None if one is too wide."""
    widest = max(len(group.marks) for group in groups)
    if widest > room:
        return None
    per_line = (room + 1) // (widest + 1)
    lines = []
    for start in range(0, len(groups), per_line):
        line: _Line = []
        for group in groups[start : start + per_line]:
            if line:
                line.append(("", None))
            line += zip(group.labels, group.marks, strict=True)
            # Machines with fewer ranks take the same width, so that all machines are aligned.
            line += [("", None)] * (widest - len(group.marks))
        lines.append(line)
    return lines


def _aligned(groups: Sequence[GridGroup], room: int) -> list[_Line] | None:
    """Return whole machines in lines without blanks; None unless all have one size."""
    sizes = {len(group.marks) for group in groups}
    size = max(sizes)
    return None if len(sizes) > 1 or size > room else _dense(groups, room - room % size)


def _dense(groups: Sequence[GridGroup], per_line: int) -> list[_Line]:
    """Return all cells one after the other."""
    cells: _Line = [
        pair for group in groups for pair in zip(group.labels, group.marks, strict=True)
    ]
    return [cells[start : start + per_line] for start in range(0, len(cells), per_line)]
