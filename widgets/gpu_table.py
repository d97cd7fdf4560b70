"""The table of the machine's GPUs, one row for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len

from ltui.widgets.bars import bar_cells, strip
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import NA
from ltui.widgets.table import Table
from ltui.widgets.view_models import Cell, GpuRow, Tone

BAR_WIDTH = 10
SHORT_BAR_WIDTH = 6
STRIP_WIDTH = 12
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
        Column(key="bar", title="", width=BAR_WIDTH, importance=6),
        Column(key="utilisation", title="util", width=5, right=True),
        Column(key="memory_bar", title="", width=BAR_WIDTH, importance=11),
        Column(key="memory", title="memory", width=15, right=True),
        Column(key="power_bar", title="", width=SHORT_BAR_WIDTH, importance=13),
        Column(key="power", title="power", width=11, right=True, importance=2),
        Column(key="temperature_bar", title="", width=SHORT_BAR_WIDTH, importance=14),
        Column(key="temperature", title="temp", width=7, right=True, importance=3),
        Column(key="sm", title="SM", width=5, right=True, importance=5),
        Column(key="tensor", title="tensor", width=6, right=True, importance=8),
        Column(key="dram", title="DRAM", width=5, right=True, importance=8),
        Column(key="clock", title="clock", width=9, right=True, importance=10),
        Column(key="strip", title="last 2 min", width=STRIP_WIDTH, importance=9),
        # Shown even without notes, so that the other columns stay in place.
        Column(key="note", title="", width=12, grows=True, importance=7),
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
        return [label, *(column for column in others if column.key not in omitted)]

    def line_of(self, row: GpuRow) -> Cells | None:
        return row.line

    def action_select(self) -> None:
        """Open a GPU, also from a row below it."""
        if self.cursor_key is not None:
            gpu = self.cursor_key.partition(BELOW)[0]
            self.post_message(self.RowSelected(self, gpu))

    def cells_of(self, row: GpuRow) -> Mapping[str, Cells]:
        sign = f"{SIGNS.get(row.tone, ' ')} "
        note_tone = row.tone if row.tone in SIGNS else Tone.WARN
        return {
            "index": (Cell(text=sign, tone=row.tone), Cell(text=row.index)),
            "name": (Cell(text=row.name, tone=Tone.DIM),),
            "ranks": (Cell(text=row.ranks),),
            "bar": bar_cells(row.utilisation, BAR_WIDTH),
            "utilisation": (
                Cell(text=row.utilisation_text, tone=Tone.DIM if row.stale else Tone.PLAIN),
            ),
            "strip": (Cell(text=strip(row.strip, STRIP_WIDTH, high=1.0), tone=Tone.DIM),),
            "sm": (Cell(text=row.sm_text),),
            "tensor": (Cell(text=row.tensor_text),),
            "dram": (Cell(text=row.dram_text),),
            "memory_bar": bar_cells(row.memory, BAR_WIDTH, Tone.DIM),
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
