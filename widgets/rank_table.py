"""The table of a run's ranks, one row for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ltui.widgets.bars import step_strip
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import NA
from ltui.widgets.table import Table
from ltui.widgets.view_models import Cell, RankRow, Tone

STRIP_WIDTH = 12
NOTE_CELLS = 42
"""A longer note is cut where there is no room for more."""
_SIGNS = {Tone.BAD: "! ", Tone.WARN: "… "}
"""Before the state's word: culprits, and ranks that wait or lag behind."""


class RankTable(Table[RankRow]):
    """A stalled rank is marked by a sign and the word of its state, and by colour."""

    NOTE: ClassVar[str] = "no rank has reported yet"
    KEEPS_CURSOR: ClassVar[bool] = False
    CLICK_OPENS: ClassVar[bool] = False
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(key="rank", title="rank", width=5),
        Column(key="pid", title="pid", width=8, right=True, importance=7),
        Column(key="device", title="device", width=7, importance=3),
        Column(key="step", title="step", width=10, right=True),
        Column(key="phase", title="phase", width=12),
        Column(key="age", title="in phase for", width=12, right=True),
        Column(key="strip", title="step times", width=STRIP_WIDTH, importance=4),
        Column(key="rate", title="samples/s", width=11, right=True, importance=5),
        Column(key="cpu", title="CPU", width=7, right=True, importance=6),
        Column(key="memory", title="memory", width=10, right=True, importance=6),
        Column(key="state", title="state", width=11),
        Column(key="note", title="", width=8, grows=True, importance=2),
    )

    def key_of(self, row: RankRow) -> str:
        return row.rank

    def columns_of(self, rows: Sequence[RankRow]) -> Sequence[Column]:
        """All columns but those of which no rank has a value."""
        maybe = ("cpu", "memory", "note")
        silent = {k for k in maybe if all(getattr(r, k) in ("", NA) for r in rows)}
        return [_for_notes(c, rows) for c in self.COLUMNS if c.key not in silent]

    def cells_of(self, row: RankRow) -> Mapping[str, Cells]:
        loud = Tone.BAD if row.state.tone is Tone.BAD else Tone.PLAIN
        quiet = Tone.BAD if row.state.tone is Tone.BAD else Tone.DIM
        sign = _SIGNS.get(row.state.tone, "  ")
        return {
            "rank": (Cell(text=row.rank, tone=loud),),
            "pid": (Cell(text=row.pid, tone=Tone.DIM),),
            "device": (Cell(text=row.device, tone=Tone.DIM),),
            "phase": (Cell(text=row.phase, tone=loud),),
            "step": (Cell(text=row.step, tone=loud),),
            "age": (Cell(text=row.age, tone=quiet),),
            "strip": (Cell(text=step_strip(row.strip, STRIP_WIDTH), tone=quiet),),
            "rate": (Cell(text=row.rate),),
            "cpu": (Cell(text=row.cpu, tone=Tone.DIM),),
            "memory": (Cell(text=row.memory, tone=Tone.DIM),),
            "state": (Cell(text=sign + row.state.text, tone=row.state.tone),),
            "note": (Cell(text=row.note, tone=loud),),
        }


def _for_notes(column: Column, rows: Sequence[RankRow]) -> Column:
    """The column of notes as wide as they are, at the cost of columns that matter less."""
    if column.key != "note":
        return column
    longest = max((len(row.note) for row in rows), default=0)
    return replace(column, width=min(max(column.width, longest), NOTE_CELLS))
