"""The GPUs of this machine, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ltui.widgets.bars import bar_cells, strip
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import NA
from ltui.widgets.shapes import Cell, GpuRow, Tone
from ltui.widgets.table import Table

BAR_WIDTH = 10
STRIP_WIDTH = 12


class GpuTable(Table[GpuRow]):
    """Utilisation and memory as bars beside their figures."""

    NOTE: ClassVar[str] = "no GPU readings yet"
    KEEPS_CURSOR: ClassVar[bool] = False
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(key="index", title="GPU", width=3, right=True),
        Column(key="name", title="name", width=18, importance=7),
        Column(key="ranks", title="ranks", width=8, importance=5),
        Column(key="bar", title="util", width=BAR_WIDTH, importance=2),
        Column(key="utilisation", title="", width=5, right=True),
        Column(key="strip", title="recent", width=STRIP_WIDTH, importance=6),
        Column(key="memory_bar", title="memory", width=BAR_WIDTH, importance=8),
        Column(key="memory", title="", width=15, right=True),
        Column(key="power", title="power", width=11, right=True, importance=3),
        Column(key="temperature", title="temp", width=6, right=True, importance=2),
        Column(key="clock", title="clock", width=9, right=True, importance=9),
        Column(key="note", title="", width=8, grows=True, importance=4),
    )

    def key_of(self, row: GpuRow) -> str:
        return row.index

    def columns_of(self, rows: Sequence[GpuRow]) -> Sequence[Column]:
        """All columns but the strip where there is no history, and those without any value."""
        gone = set()
        if not any(r.strip for r in rows):
            gone.add("strip")
        if all(r.clock_text in ("", NA) for r in rows):
            gone.add("clock")
        if not any(r.note for r in rows):
            gone.add("note")
        return [c for c in self.COLUMNS if c.key not in gone]

    def cells_of(self, row: GpuRow) -> Mapping[str, Cells]:
        return {
            "index": (Cell(text=row.index),),
            "name": (Cell(text=row.name, tone=Tone.DIM),),
            "ranks": (Cell(text=row.ranks),),
            "bar": bar_cells(row.utilisation, BAR_WIDTH),
            "utilisation": (Cell(text=row.utilisation_text),),
            "strip": (Cell(text=strip(row.strip, STRIP_WIDTH, high=1.0), tone=Tone.DIM),),
            "memory_bar": bar_cells(row.memory, BAR_WIDTH, Tone.DIM),
            "memory": (Cell(text=row.memory_text),),
            "power": (Cell(text=row.power_text),),
            "temperature": (row.temperature,),
            "clock": (Cell(text=row.clock_text, tone=Tone.DIM),),
            "note": (Cell(text=row.note, tone=Tone.WARN),),
        }
