"""Home's list of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import BindingType

from ltui.app.run_rows import RunRow
from ltui.app.screens.keys import bindings
from ltui.widgets.bars import bar_cells
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import percent
from ltui.widgets.shapes import Cell, Tone
from ltui.widgets.table import Table

BAR_WIDTH = 10


class RunsTable(Table[RunRow]):
    """Rows keep their place; the cursor stays on its run."""

    NOTE: ClassVar[str] = (
        "no run yet: Enter on a preset starts one, and quickstart takes about a minute"
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "runs",
        """
        r        | screen.resume | resume | Resume the run under the cursor
        delete,D | screen.delete | delete | Delete the run under the cursor; asks first
        """,
    )
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(key="name", title="run", width=20),
        Column(key="preset", title="preset", width=20, importance=6),
        Column(key="state", title="state", width=9),
        Column(key="bar", title="", width=BAR_WIDTH, importance=7),
        Column(key="share", title="done", width=5, right=True, importance=3),
        Column(key="progress", title="", width=22, importance=8),
        Column(key="metric", title="loss", width=14, importance=5),
        Column(key="age", title="since", width=9, right=True, importance=2),
        Column(key="note", title="", width=12, grows=True, importance=4),
    )

    def key_of(self, row: RunRow) -> str:
        return row.id

    def cells_of(self, row: RunRow) -> Mapping[str, Cells]:
        done = "" if row.share is None else percent(row.share)
        return {
            "name": (row.sign, Cell(text=f" {row.name}")),
            "preset": (Cell(text=row.preset, tone=Tone.DIM),),
            "state": (row.state,),
            "bar": bar_cells(row.share, BAR_WIDTH, Tone.DIM),
            "share": (Cell(text=done),),
            "progress": (Cell(text=row.progress, tone=Tone.DIM),),
            "metric": (Cell(text=row.metric),),
            "age": (Cell(text=row.age, tone=Tone.DIM),),
            "note": (row.note,),
        }
