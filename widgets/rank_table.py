"""The table of a run's ranks, one row for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from msgspec.structs import replace
from rich.cells import cell_len

from ltui.widgets.columns import Cells, Column, step_strip
from ltui.widgets.formats import NA
from ltui.widgets.table import Table
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, RankRow

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
