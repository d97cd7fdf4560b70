"""The GPUs of this machine, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ltui.widgets.bars import bar_cells, strip
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import NA
from ltui.widgets.table import Table
from ltui.widgets.view_models import Cell, GpuRow, Tone

BAR_WIDTH = 10
STRIP_WIDTH = 12
SIGNS = {Tone.BAD: "!", Tone.WARN: "▲"}
"""Before a GPU with which something is wrong; others have a blank."""

_TEXTS = {
    "ranks": "ranks",
    "sm": "sm_text",
    "tensor": "tensor_text",
    "dram": "dram_text",
    "power": "power_text",
    "clock": "clock_text",
}
"""Columns that are left out if no GPU has a value for them."""


class GpuTable(Table[GpuRow]):
    """Utilisation and memory as bars beside their figures."""

    NOTE: ClassVar[str] = "no GPU readings yet"
    KEEPS_CURSOR: ClassVar[bool] = False
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(key="index", title="  GPU", width=6),
        Column(key="name", title="name", width=16, importance=12),
        Column(key="ranks", title="rank", width=6, importance=4),
        Column(key="bar", title="", width=BAR_WIDTH, importance=6),
        Column(key="utilisation", title="util", width=5, right=True),
        Column(key="strip", title="last 2 min", width=STRIP_WIDTH, importance=9),
        Column(key="sm", title="SM", width=5, right=True, importance=5),
        Column(key="tensor", title="tensor", width=6, right=True, importance=8),
        Column(key="dram", title="DRAM", width=5, right=True, importance=8),
        Column(key="memory_bar", title="", width=BAR_WIDTH, importance=13),
        Column(key="memory", title="memory", width=15, right=True),
        Column(key="power", title="power", width=11, right=True, importance=2),
        Column(key="temperature", title="temp", width=7, right=True, importance=3),
        Column(key="clock", title="clock", width=9, right=True, importance=10),
        # Always there, so that the others stay in place while something is noted.
        Column(key="note", title="", width=12, grows=True, importance=7),
    )

    def key_of(self, row: GpuRow) -> str:
        return row.index

    def columns_of(self, rows: Sequence[GpuRow]) -> Sequence[Column]:
        """All columns but the strip where there is no history, and those without any value."""
        gone = {k for k, name in _TEXTS.items() if all(getattr(r, name) in ("", NA) for r in rows)}
        # A GPU whose ranks aren't known is worth an empty column; power that is refused is said.
        gone -= {"power"}
        if not any(r.strip for r in rows):
            gone.add("strip")
        return [c for c in self.COLUMNS if c.key not in gone]

    def cells_of(self, row: GpuRow) -> Mapping[str, Cells]:
        sign = f"{SIGNS.get(row.tone, ' ')} "
        loud = row.tone if row.tone in SIGNS else Tone.WARN
        return {
            "index": (Cell(text=sign, tone=row.tone), Cell(text=row.index)),
            "name": (Cell(text=row.name, tone=Tone.DIM),),
            "ranks": (Cell(text=row.ranks),),
            "bar": bar_cells(row.utilisation, BAR_WIDTH),
            "utilisation": (Cell(text=row.utilisation_text),),
            "strip": (Cell(text=strip(row.strip, STRIP_WIDTH, high=1.0), tone=Tone.DIM),),
            "sm": (Cell(text=row.sm_text),),
            "tensor": (Cell(text=row.tensor_text),),
            "dram": (Cell(text=row.dram_text),),
            "memory_bar": bar_cells(row.memory, BAR_WIDTH, Tone.DIM),
            "memory": (Cell(text=row.memory_text),),
            "power": (Cell(text=row.power_text),),
            "temperature": (row.temperature,),
            "clock": (Cell(text=row.clock_text, tone=Tone.DIM),),
            "note": (Cell(text=_note(row), tone=loud),),
        }


def _note(row: GpuRow) -> str:
    """What is wrong with the reading, else what lowers the clocks."""
    return row.note or (f"throttled: {row.throttle}" if row.throttle else "")
