"""The table of runs on the home screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import BindingType

from ltui.app.runs.run_rows import RunRow
from ltui.widgets.bars import bar_cells
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import percent
from ltui.widgets.make_bindings import bindings
from ltui.widgets.table import Table
from ltui.widgets.view_models import Cell, Tone

BAR_WIDTH = 10


class RunsTable(Table[RunRow]):
    """A table with one row for each run. The cursor stays on its run when the rows change."""

    NOTE: ClassVar[str] = "No runs yet. Select a preset and press Enter to launch it."
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "runs",
        """
        R        | screen.rerun    | run again | Start a new run with the settings of this one
        o        | screen.sort     | sort      | Sort runs by age, name, preset, state or metric
        space    | screen.mark     | mark      | Mark the run for the keys that act on several runs
        a        | screen.mark_all | mark all  | Mark all listed runs, or remove their marks
        [Marked runs, or the selected one]
        C        | screen.compare        | compare | Compare curves and settings of marked runs
        s        | screen.stop           | stop    | Stop, each with a checkpoint; asks first
        r        | screen.resume         | resume  | Resume; one run with changes if wanted
        asterisk | screen.star           | star    | Give or take away the star
        T        | screen.label('tags')  | tags    | Add and remove tags
        G        | screen.label('group') | group   | Set the group
        n        | screen.label('note')  | note    | Write a note
        x        | screen.export         | export  | Export the metrics to a file
        delete,D | screen.delete         | delete  | Delete; asks first
        """,
    )
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(key="name", title="run", width=20),
        Column(key="preset", title="preset", width=20, importance=6),
        Column(key="state", title="state", width=9),
        Column(key="tags", title="tags", width=16, importance=9),
        Column(key="bar", title="", width=BAR_WIDTH, importance=7),
        Column(key="share", title="done", width=5, right=True, importance=3),
        Column(key="progress", title="", width=22, importance=8),
        Column(key="metric", title="loss", width=14, right=True, importance=5),
        Column(key="created", title="created", width=9, right=True, importance=2),
        Column(key="note", title="", width=12, grows=True, importance=4),
    )

    common_metric = "loss"
    """The metric of most rows. It is the column's title; other metrics are named in their cells."""

    def columns_of(self, rows: Sequence[RunRow]) -> Sequence[Column]:
        names = Counter(row.metric_name for row in rows if row.metric_name)
        self.common_metric = max(names, key=lambda n: (names[n], n == "loss"), default="loss")
        tagged = any(row.tags for row in rows)
        return [
            replace(column, title=self.common_metric) if column.key == "metric" else column
            for column in self.COLUMNS
            if column.key != "tags" or tagged
        ]

    def key_of(self, row: RunRow) -> str:
        return row.id

    def cells_of(self, row: RunRow) -> Mapping[str, Cells]:
        done = "" if row.share is None else percent(row.share)
        return {
            "name": (
                row.sign,
                Cell(text="◆" if row.marked else " ", tone=Tone.ACCENT),
                Cell(text=f"{row.name}{' ★' if row.star else ''}"),
            ),
            "tags": (Cell(text=row.tags, tone=Tone.DIM),),
            "preset": (Cell(text=row.preset, tone=Tone.DIM),),
            "state": (row.state,),
            "bar": bar_cells(row.share, BAR_WIDTH, Tone.DIM),
            "share": (Cell(text=done),),
            "progress": (Cell(text=row.progress, tone=Tone.DIM),),
            "metric": self._metric_cells(row),
            "created": (Cell(text=row.created, tone=Tone.DIM),),
            "note": (row.note,),
        }

    def _metric_cells(self, row: RunRow) -> Cells:
        if row.metric_name in ("", self.common_metric):
            return (Cell(text=row.metric),)
        return (Cell(text=f"{row.metric_name} ", tone=Tone.DIM), Cell(text=row.metric))
