"""The tables of a run: a row for each of its ranks, and one for each GPU of the machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import ClassVar

from msgspec.structs import replace
from rich.cells import cell_len

from ltui.widgets.columns import Cells, Column, bar_cells, step_strip, strip
from ltui.widgets.formats import NA, duration
from ltui.widgets.table import Table
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, GpuRow, RankRow

STRIP_WIDTH = 12
NOTE_CELLS = 42
"""Maximum cells that notes take from other columns; longer notes are cut."""
GROUPED_TITLE = "machine, rank"
"""Title of the first column if the table has rows of machines."""
GROUPED_STATE_CELLS = 14
"""Cells of the state in a table with rows of machines: ``! unreachable``."""
_SIGNS = {Tone.BAD: "! ", Tone.WARN: "… "}
"""Signs before the state of culprits, and of ranks that wait or are slow."""


class RankTable(Table[RankRow]):
    """A table in which a sign, the state and a colour mark stalled ranks.

    The columns of metrics come with the rows; see ``RankRow.metrics``.
    """

    NOTE: ClassVar[str] = "no rank has reported yet"
    KEEPS_CURSOR: ClassVar[bool] = False
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(key="rank", title="rank", width=5),
        Column(key="pid", title="pid", width=8, right=True, importance=7),
        Column(key="device", title="device", width=7, importance=3),
        Column(key="step", title="step", width=10, right=True),
        Column(key="phase", title="phase", width=12),
        Column(key="age", title="in phase for", width=12, right=True),
        Column(key="strip", title="step times", width=STRIP_WIDTH, importance=4),
        Column(key="state", title="state", width=11),
        Column(key="note", title="", width=8, grows=True, importance=2, optional=True),
    )

    def key_of(self, row: RankRow) -> str:
        return row.key or row.rank

    def columns_of(self, rows: Sequence[RankRow]) -> Sequence[Column]:
        """Return the columns, with metrics before the state, without empty optional columns."""
        metrics = rows[0].metrics if rows else ()
        shown = [
            metric.column
            for index, metric in enumerate(metrics)
            if not metric.column.optional or _has_values(r.metrics[index].cell.text for r in rows)
        ]
        *fixed, state, note = self.COLUMNS
        notes = [row.note for row in rows]
        if rows and rows[0].key:
            fixed, state = _grouped(fixed, state, rows)
        # The column of notes is as wide as the longest one; less important columns give way.
        longest = max(map(len, notes), default=0)
        note = replace(note, width=min(max(note.width, longest), NOTE_CELLS))
        return [*fixed, *shown, state, *([note] if _has_values(notes) else [])]

    def cells_of(self, row: RankRow) -> Mapping[str, Cells]:
        strong = Tone.BAD if row.state.tone is Tone.BAD else Tone.PLAIN
        weak = Tone.BAD if row.state.tone is Tone.BAD else Tone.DIM
        if row.is_old:
            strong = weak = Tone.DIM
        sign, metrics = _SIGNS.get(row.state.tone, "  "), row.metrics
        if row.is_old:
            metrics = tuple(replace(m, cell=replace(m.cell, tone=Tone.DIM)) for m in metrics)
        return {
            "rank": (Cell(text=row.rank, tone=strong),),
            "pid": (Cell(text=row.pid, tone=Tone.DIM),),
            "device": (Cell(text=row.device, tone=Tone.DIM),),
            "phase": (Cell(text=row.phase, tone=strong),),
            "step": (Cell(text=row.step, tone=strong),),
            "age": (Cell(text=row.age, tone=weak),),
            "strip": (Cell(text=step_strip(row.strip, STRIP_WIDTH), tone=weak),),
            "state": (Cell(text=sign + row.state.text, tone=row.state.tone),),
            "note": (Cell(text=row.note, tone=strong),),
            **{metric.column.key: (metric.cell,) for metric in metrics},
        }


def _has_values(texts: Iterable[str]) -> bool:
    return any(text not in ("", NA) for text in texts)


def _grouped(
    fixed: Sequence[Column], state: Column, rows: Sequence[RankRow]
) -> tuple[list[Column], Column]:
    """Return the columns for rows of machines and ranks, without those that are blank."""
    label, *others = fixed
    width = max(len(GROUPED_TITLE), *(cell_len(row.rank) for row in rows))
    # The step gives way before the phase: it is usually the same on all ranks.
    others = [replace(c, importance=2) if c.key == "step" else c for c in others]
    shown = [c for c in others if any(getattr(row, c.key, None) for row in rows)]
    return (
        [replace(label, title=GROUPED_TITLE, width=width), *shown],
        replace(state, width=GROUPED_STATE_CELLS),
    )


BAR_WIDTH = 10
SHORT_BAR_WIDTH = 6
WIDE = 100
"""Cells of width from which the bars are long."""
BELOW = "\n"
"""Separates the label of a GPU from the number of a row below it, in the keys of such rows."""
SIGNS = {Tone.BAD: "!", Tone.WARN: "▲"}
"""Sign before a GPU that has a problem; other GPUs have a blank."""

_OPTIONAL_COLUMNS = {
    "ranks": "ranks",
    "sm": "sm_text",
    "tensor": "tensor_text",
    "dram": "dram_text",
    "clock": "clock_text",
}
"""Columns that are omitted if no GPU has a value, with the fields of ``GpuRow`` they show.

The power is always shown: its ``n/a`` means that the driver refused the reading.
"""


class GpuTable(Table[GpuRow]):
    """A table with utilisation and memory as bars and as numbers."""

    NOTE: ClassVar[str] = "no GPU readings yet"
    KEEPS_CURSOR: ClassVar[bool] = False
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(key="index", title="  GPU", width=6),
        Column(key="name", title="name", width=16, importance=12),
        Column(key="ranks", title="rank", width=6, importance=4),
        Column(key="bar", title="", width=BAR_WIDTH, importance=5),
        Column(key="utilisation", title="util", width=5, right=True),
        Column(key="memory_bar", title="", width=BAR_WIDTH, importance=6),
        Column(key="memory", title="memory", width=15, right=True),
        Column(key="power_bar", title="", width=SHORT_BAR_WIDTH, importance=13),
        Column(key="power", title="power", width=11, right=True, importance=2),
        Column(key="temperature_bar", title="", width=SHORT_BAR_WIDTH, importance=14),
        Column(key="temperature", title="temp", width=7, right=True, importance=3),
        Column(key="sm", title="SM", width=5, right=True, importance=7),
        Column(key="tensor", title="tensor", width=6, right=True, importance=9),
        Column(key="dram", title="DRAM", width=5, right=True, importance=9),
        Column(key="clock", title="clock", width=9, right=True, importance=11),
        Column(key="strip", title="last 2 min", width=STRIP_WIDTH, importance=10),
        # Shown even without notes, so that the other columns stay in place.
        Column(key="note", title="", width=12, grows=True, importance=8),
    )

    def key_of(self, row: GpuRow) -> str:
        return row.index

    def columns_of(self, rows: Sequence[GpuRow]) -> Sequence[Column]:
        """Return the columns, without those that no GPU has a value for.

        The title of the panel names the model if all GPUs are the same.
        """
        rows = [row for row in rows if row.line is None]
        omitted = {
            key
            for key, field in _OPTIONAL_COLUMNS.items()
            if all(getattr(row, field) in ("", NA) for row in rows)
        }
        if not any(row.strip for row in rows):
            omitted.add("strip")
        if len(rows) > 1 and len({row.name for row in rows} - {NA}) == 1:
            omitted.add("name")
        if any(row.in_block for row in rows):
            omitted.add("note")
        index, *others = self.COLUMNS
        longest = max((cell_len(row.index) for row in rows), default=0) + len("! ")
        label = replace(index, width=max(index.width, longest))
        shown = [label, *(column for column in others if column.key not in omitted)]
        if self.size.width < WIDE:
            ranks = max((cell_len(row.ranks) for row in rows), default=0)
            widths = {"ranks": max(4, ranks), "bar": SHORT_BAR_WIDTH, "memory_bar": SHORT_BAR_WIDTH}
            shown = [replace(c, width=widths.get(c.key, c.width)) for c in shown]
        return shown

    def line_of(self, row: GpuRow) -> Cells | None:
        return row.line

    def action_select(self) -> None:
        """Open a GPU, also from a row below it."""
        if self.cursor_key is not None:
            gpu = self.cursor_key.partition(BELOW)[0]
            self.post_message(self.RowSelected(self, gpu))

    def cells_of(self, row: GpuRow) -> Mapping[str, Cells]:
        sign = f"{SIGNS.get(row.tone, ' ')} "
        bar = BAR_WIDTH if self.size.width >= WIDE else SHORT_BAR_WIDTH
        note_tone = row.tone if row.tone in SIGNS else Tone.WARN
        return {
            "index": (Cell(text=sign, tone=row.tone), Cell(text=row.index)),
            "name": (Cell(text=row.name, tone=Tone.DIM),),
            "ranks": (Cell(text=row.ranks),),
            "bar": bar_cells(row.utilisation, bar),
            "utilisation": (
                Cell(text=row.utilisation_text, tone=Tone.DIM if row.stale else Tone.PLAIN),
            ),
            "strip": (Cell(text=strip(row.strip, STRIP_WIDTH, high=1.0), tone=Tone.DIM),),
            "sm": (Cell(text=row.sm_text),),
            "tensor": (Cell(text=row.tensor_text),),
            "dram": (Cell(text=row.dram_text),),
            "memory_bar": bar_cells(row.memory, bar, Tone.DIM),
            "memory": (Cell(text=row.memory_text),),
            "power_bar": bar_cells(row.power, SHORT_BAR_WIDTH, Tone.DIM),
            "power": (Cell(text=row.power_text),),
            "temperature_bar": bar_cells(row.temperature_share, SHORT_BAR_WIDTH, Tone.DIM),
            "temperature": (row.temperature,),
            "clock": (Cell(text=row.clock_text, tone=Tone.DIM),),
            "note": (Cell(text=_note(row), tone=note_tone),),
        }


def _note(row: GpuRow) -> str:
    """Return the problem with the readings, else the reason for reduced clocks."""
    return row.note or (f"throttled: {row.throttle}" if row.throttle else "")


LEAST_WIDTH = 23
"""Minimum cells for one GPU: sign, number, a readable strip and a percentage."""
NARROW_WIDTH = 13
"""Minimum cells for one GPU if there are more GPUs than lines at ``LEAST_WIDTH``."""
SHORT_LABEL = 5
"""Maximum cells of a label for which the widths above are enough: ``15/6``."""
GAP = 2
"""Cells between two columns of GPUs."""
_PERCENT_CELLS = 6
_LOW, _HIGH = 0.34, 0.67
"""Limits between faint, dim and bright blocks, as fractions of full utilisation."""


def heat_lines(rows: Sequence[GpuRow], most_lines: int, block_s: float, width: int) -> list[Cells]:
    """Return a legend, and a strip for each GPU. Tall, bright blocks mean high utilisation.

    There are at most ``most_lines`` lines below the legend, if the GPUs fit side by side. A block
    represents ``block_s`` seconds.
    """
    if not rows:
        return []
    label_width = max(len(row.index) for row in rows)
    columns = _columns(len(rows), most_lines, width, max(0, label_width - SHORT_LABEL))
    lines = math.ceil(len(rows) / columns)
    column_width = (width - GAP * (columns - 1)) // columns
    cells = max(1, column_width - label_width - 3 - _PERCENT_CELLS)
    drawn: list[Cells] = [(Cell(text=_legend(rows, cells, block_s), tone=Tone.DIM),)]
    for y in range(lines):
        line: list[Cell] = []
        for row in rows[y::lines]:
            line += [Cell(text=" " * GAP)] if line else []
            line += [
                Cell(text=f"{SIGNS.get(row.tone, ' ')} ", tone=row.tone),
                Cell(
                    text=f"{row.index:>{label_width}} ", tone=Tone.DIM if row.stale else Tone.PLAIN
                ),
                *_shades(row.heat, cells, stale=row.stale),
                _percentage(row),
            ]
        drawn.append(tuple(line))
    return drawn


def _columns(count: int, most_lines: int, width: int, extra: int) -> int:
    """Return the number of columns of strips. ``extra``: cells that long labels need."""
    fitting = max(1, (width + GAP) // (LEAST_WIDTH + extra + GAP))
    if math.ceil(count / fitting) > most_lines:
        fitting = max(1, (width + GAP) // (NARROW_WIDTH + extra + GAP))
    return min(fitting, max(1, math.ceil(count / max(1, most_lines))))


def _legend(rows: Sequence[GpuRow], cells: int, block_s: float) -> str:
    """Return the explanation of the blocks, with the time that a strip covers."""
    covered = min(cells, max(len(row.heat) for row in rows)) * block_s
    span = f"utilisation, last {duration(round(covered))}" if covered else "utilisation"
    return f"  {span}   ▁ 0 %  ▇ 100 %"


def _percentage(row: GpuRow) -> Cell:
    """Return the current utilisation, or the word that there is none."""
    if row.stale:
        return Cell(text="old".rjust(_PERCENT_CELLS), tone=Tone.DIM)
    return Cell(text=row.utilisation_text.rjust(_PERCENT_CELLS))


def _shades(values: Sequence[float], width: int, *, stale: bool) -> list[Cell]:
    """Return the strip, with low values nearer to the background, and old ones all dim."""
    shown = list(values)[-width:]
    shades = [Tone.FAINT] * (width - len(shown)) + [Tone.DIM if stale else _shade(v) for v in shown]
    blocks = zip(strip(shown, width, high=1.0), shades, strict=True)
    return [
        Cell(text="".join(block for block, _ in run), tone=tone)
        for tone, run in groupby(blocks, key=lambda block: block[1])
    ]


def _shade(value: float) -> Tone:
    if not math.isfinite(value) or value < _LOW:
        return Tone.FAINT
    return Tone.DIM if value < _HIGH else Tone.ACCENT
