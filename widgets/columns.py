"""Cells of tables: the columns that fit into a width, and the bars and strips in them.

Pure. A column has a fixed width, so that numbers stay in place. If not all columns fit, the least
important ones are omitted. A missing number is drawn as a blank and never as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Generic, TypeVar, overload

from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len, set_cell_size

from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

GAP = 2
"""Cells between two columns."""

Cells = tuple[Cell, ...]
"""A text in one or several tones, for example one line or the content of one column."""


class Column(Struct, frozen=True, kw_only=True):
    """One column of a table."""

    key: str
    title: str
    width: int
    importance: int = 1
    """Rank by importance, 1 for the most important. If space is short, high numbers are omitted."""
    right: bool = False
    """Align the content to the right, as for numbers."""
    optional: bool = False
    """Omit the column if no row has a value for it."""
    grows: bool = False
    """Give the remaining width to this column."""
    least: int = 0
    """Width to which a table that scrolls sideways may cut its last column; 0 if it may not."""
    full: int = 0
    """Width in which no text is cut; a table that scrolls sideways gives it what it has left."""


class PlacedColumn(Struct, frozen=True):
    """A column with its position and its width in cells."""

    column: Column
    x: int
    width: int


def fit_columns(columns: Sequence[Column], width: int) -> tuple[PlacedColumn, ...]:
    """Return the columns that fit into ``width`` cells; at least the most important one."""
    shown = list(columns)
    while len(shown) > 1 and _total_width(shown) > width:
        shown.remove(max(reversed(shown), key=lambda c: c.importance))
    spare = max(0, width - _total_width(shown))
    placed, x = [], 0
    for column in shown:
        column_width = column.width + (spare if column.grows else 0)
        if column.grows:
            spare = 0
        placed.append(PlacedColumn(column, x, max(1, min(column_width, width - x))))
        x += column_width + GAP
    return tuple(placed)


class ScrolledColumns(Struct, frozen=True):
    """The columns that a table shows of those that do not fit, and how many are hidden."""

    placed: tuple[PlacedColumn, ...]
    left: int
    right: int


def scrolled_columns(columns: Sequence[Column], width: int, scrolled: int) -> ScrolledColumns:
    """Return the first column, and those after it without the first ``scrolled``, as far as they
    fit into ``width`` cells. Remaining cells go to columns whose texts would be cut."""
    head, rest = list(columns[:1]), list(columns[1:])
    # The last columns stay in view: there is nothing to the right of them.
    left = max(0, min(scrolled, len(rest) - 1))
    while left and _total_width([*head, *rest[left - 1 :]]) <= width:
        left -= 1
    shown = [*head, *rest[left : left + 1]]
    for column in rest[left + 1 :]:
        room = width - _total_width(shown) - GAP
        if room < column.width:
            if column.least and room >= column.least:
                shown.append(replace(column, width=room))
            break
        shown.append(column)
    spare = max(0, width - _total_width(shown))
    placed, x = [], 0
    for column in shown:
        more = min(spare, max(0, column.full - column.width))
        spare -= more
        # Of the last two columns of a very narrow table, the second one may be cut.
        placed.append(PlacedColumn(column, x, max(1, min(column.width + more, width - x))))
        x += column.width + more + GAP
    return ScrolledColumns(tuple(placed), left, len(rest) - left - len(shown) + 1)


def _total_width(columns: Sequence[Column]) -> int:
    return sum(c.width for c in columns) + GAP * (len(columns) - 1)


def pad_or_cut(cells: Cells, placed: PlacedColumn) -> Cells:
    """Return ``cells`` in exactly the column's width: padded, or cut with an ellipsis."""
    used = sum(cell_len(c.text) for c in cells)
    if used > placed.width:
        return cut_line(cells, placed.width)
    pad = Cell(text=" " * (placed.width - used))
    return (pad, *cells) if placed.column.right else (*cells, pad)


def shortened(text: str, width: int) -> str:
    """Cut a text that is longer than ``width`` cells; it then ends with an ellipsis."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def cut_line(cells: Cells, width: int) -> Cells:
    """Cut cells that are longer than ``width``; they then end with an ellipsis."""
    if sum(cell_len(c.text) for c in cells) <= width:
        return cells
    cut: list[Cell] = []
    available = width - 1
    for cell in cells:
        if available <= 0:
            break
        text = set_cell_size(cell.text, min(cell_len(cell.text), available))
        cut.append(replace(cell, text=text))
        available -= cell_len(text)
    tone = cut[-1].tone if cut else Tone.PLAIN
    return (*cut, Cell(text="…", tone=tone))


def title_line(placed: Sequence[PlacedColumn]) -> Cells:
    """Return the line of column titles."""
    return row_line(
        {p.column.key: (Cell(text=p.column.title, tone=Tone.DIM),) for p in placed}, placed
    )


def row_line(row: Mapping[str, Cells], placed: Sequence[PlacedColumn]) -> Cells:
    """Return all cells of a row, with gaps between the columns."""
    cells: list[Cell] = []
    for index, placed_column in enumerate(placed):
        if index:
            cells.append(Cell(text=" " * GAP))
        cells.extend(pad_or_cut(row.get(placed_column.column.key, ()), placed_column))
    return tuple(cells)


def centred(text: str, width: int) -> Cells:
    """Return a dim text in the middle of ``width`` cells."""
    text = shortened(text, width)
    return Cell(text=" " * max(0, (width - cell_len(text)) // 2)), Cell(text=text, tone=Tone.DIM)


def changed_columns(
    old: Mapping[str, Cells], new: Mapping[str, Cells], placed: Sequence[PlacedColumn]
) -> tuple[PlacedColumn, ...]:
    """Return the columns in which two versions of a row differ."""
    return tuple(p for p in placed if old.get(p.column.key) != new.get(p.column.key))


Row = TypeVar("Row")

SAMPLES = 24
"""Number of rows, from the first one, that decide which columns a table has."""


class LazyRows(Sequence[Row], Generic[Row]):
    """A sequence of rows that are built when they are needed, each of them once."""

    def __init__(
        self, keys: Sequence[str], build: Callable[[int], Row], samples: Sequence[int] = ()
    ) -> None:
        """``keys``: the key of each row. ``build``: returns the row at an index. ``samples``:
        further rows, with long texts, that the widths of columns depend on."""
        self.keys = tuple(keys)
        self._build = build
        self._samples = samples
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if index not in self._rows:
            self._rows[index] = self._build(index)
        return self._rows[index]

    def samples(self) -> tuple[Row, ...]:
        """Return the rows that decide which columns a table has."""
        indices = {*range(min(SAMPLES, len(self))), *self._samples}
        return tuple(self[index] for index in sorted(indices))


HEIGHTS = "▁▂▃▄▅▆▇"
"""Blocks of rising height. There are seven, because a full block would touch the row above."""


def bar_cells(share: float | None, width: int, tone: Tone = Tone.PLAIN) -> tuple[Cell, ...]:
    """Return a bar of ``width`` cells for a fraction, to half a cell; blanks if it is unknown.

    Its filled part is in ``tone``, the rest faint.

    The bar is a thin line, because blocks in adjacent rows would merge. A small fraction is always
    visible, and a fraction below 1 never fills the bar.
    """
    if share is None or not math.isfinite(share):
        return (Cell(text=" " * width),)
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    if 0 < share < 1:
        halves = min(2 * width - 1, max(1, halves))
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    track = "┈" * (width - len(filled))
    return Cell(text=filled, tone=tone), Cell(text=track, tone=Tone.FAINT)


def strip(values: Sequence[float], width: int, *, high: float | None = None) -> str:
    """Return the newest ``width`` values as blocks, the newest on the right; NaN is a gap.

    ``high`` is the value of a full block; by default the maximum of the values.
    """
    shown = list(values)[-width:] if width > 0 else []
    finite = [v for v in shown if math.isfinite(v)]
    top = high if high is not None else max(finite, default=1.0)
    return "".join(_block(v, top) for v in shown).rjust(width)


def _block(value: float, high: float) -> str:
    if not math.isfinite(value):
        return " "
    share = value / high if high > 0 else 0.0
    return HEIGHTS[min(len(HEIGHTS) - 1, max(0, math.floor(share * len(HEIGHTS))))]


def step_strip(seconds: Sequence[float], width: int) -> str:
    """Return a strip of step times in which usual steps are low, so that a slow one is visible."""
    finite = [v for v in list(seconds)[-width:] if math.isfinite(v)]
    if not finite:
        return " " * width
    return strip(seconds, width, high=max(4 * median(finite), max(finite)) or 1.0)
