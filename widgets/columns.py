"""Columns of a table: which fit into a width, where they stand, and a row's cells cut to them.

Pure. A column has one width, so that numbers keep their place; where all do not fit, the least
important ones are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from ltui.widgets.view_models import Cell, Tone

GAP = 2
"""Cells between two columns."""

Cells = tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    key: str
    title: str
    width: int
    importance: int = 1
    """Where room is short, the columns with the greatest number go first."""
    right: bool = False
    """Numbers stand at the right."""
    grows: bool = False
    """Takes the room that is left."""


@dataclass(frozen=True, slots=True)
class PlacedColumn:
    column: Column
    x: int
    width: int


def fit_columns(columns: Sequence[Column], width: int) -> tuple[PlacedColumn, ...]:
    """The columns shown in ``width`` cells, in their order; the most important one always."""
    kept = list(columns)
    while len(kept) > 1 and _needed(kept) > width:
        kept.remove(max(reversed(kept), key=lambda c: c.importance))
    spare = max(0, width - _needed(kept))
    placed, x = [], 0
    for column in kept:
        room = column.width + (spare if column.grows else 0)
        if column.grows:
            spare = 0
        placed.append(PlacedColumn(column, x, max(1, min(room, width - x))))
        x += room + GAP
    return tuple(placed)


def _needed(columns: Sequence[Column]) -> int:
    return sum(c.width for c in columns) + GAP * (len(columns) - 1)


def pad_or_cut(cells: Cells, place: PlacedColumn) -> Cells:
    """``cells`` in exactly the column's width: padded on its free side, cut with an ellipsis."""
    used = sum(cell_len(c.text) for c in cells)
    if used > place.width:
        return _cut(cells, place.width)
    pad = Cell(text=" " * (place.width - used))
    return (pad, *cells) if place.column.right else (*cells, pad)


def _cut(cells: Cells, width: int) -> Cells:
    kept: list[Cell] = []
    room = width - 1
    for cell in cells:
        if room <= 0:
            break
        text = cell.text if cell_len(cell.text) <= room else set_cell_size(cell.text, room)
        kept.append(Cell(text=text, tone=cell.tone))
        room -= cell_len(text)
    tone = kept[-1].tone if kept else Tone.PLAIN
    return (*kept, Cell(text="…", tone=tone))


def title_line(placed: Sequence[PlacedColumn]) -> Cells:
    """The line of titles."""
    return row_line(
        {p.column.key: (Cell(text=p.column.title, tone=Tone.DIM),) for p in placed}, placed
    )


def row_line(row: Mapping[str, Cells], placed: Sequence[PlacedColumn]) -> Cells:
    """All cells of a row, with the gaps between its columns."""
    found: list[Cell] = []
    for index, place in enumerate(placed):
        if index:
            found.append(Cell(text=" " * GAP))
        found.extend(pad_or_cut(row.get(place.column.key, ()), place))
    return tuple(found)


def changed_columns(
    old: Mapping[str, Cells], new: Mapping[str, Cells], placed: Sequence[PlacedColumn]
) -> tuple[PlacedColumn, ...]:
    """The columns in which two versions of a row differ."""
    return tuple(p for p in placed if old.get(p.column.key) != new.get(p.column.key))
