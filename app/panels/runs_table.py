"""The table of runs on the home screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len
from textual.binding import BindingType

from ltui.app.runs.run_fields import SETTING, Kind, kind_of
from ltui.app.runs.run_rows import DEFAULT_COLUMNS, RunRow
from ltui.widgets.bars import bar_cells
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import percent
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name
from ltui.widgets.table import Table
from ltui.widgets.view_models import Cell, Tone

BAR_WIDTH = 10
TEXT_COLUMN = "text "
"""Prefix of the keys of chosen columns, as a metric could have the name of another column."""
MAX_COLUMN = 24
"""Maximum width of a chosen column."""


class RunsTable(Table[RunRow]):
    """A table with one row for each run. The cursor stays on its run when the rows change."""

    NOTE: ClassVar[str] = "No runs yet. Select a preset and press Enter to launch it."
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "runs",
        """
        R        | screen.rerun    | run again | Start a new run with the settings of this one
        o        | screen.sort     | sort      | Sort runs by the next column
        O        | screen.reverse  | reverse   | Reverse the order of the runs
        m        | screen.columns  | columns   | Choose columns and order: fields, metrics, settings
        space    | screen.mark     | mark      | Mark the run for the keys that act on several runs
        a        | screen.mark_all | mark all  | Mark all listed runs, or remove their marks
        [Marked runs, or the selected one]
        C        | screen.compare        | compare | Compare curves and settings of marked runs
        s        | screen.stop           | stop    | Stop; the question names what is saved
        r        | screen.resume         | resume  | Resume; one run with changes if wanted
        asterisk | screen.star           | star    | Give or take away the star
        T        | screen.label('tags')  | tags    | Add and remove tags
        G        | screen.label('group') | group   | Set the group
        n        | screen.label('note')  | note    | Write a note
        u        | screen.undo           | undo    | Undo the last change of labels
        x        | screen.export         | export  | Export the metrics to a file
        delete,D | screen.delete         | delete  | Delete; asks first
        """,
    )
    NAME: ClassVar[Column] = Column(key="name", title="run", width=20)
    OWN_COLUMNS: ClassVar[Mapping[str, tuple[Column, ...]]] = {
        "preset": (Column(key="preset", title="preset", width=20, importance=7),),
        "state": (Column(key="state", title="state", width=9),),
        "tag": (Column(key="tag", title="tags", width=16, importance=6),),
        "done": (
            Column(key="bar", title="", width=BAR_WIDTH, importance=99),
            Column(key="done", title="done", width=5, right=True, importance=3),
        ),
        "step": (Column(key="step", title="", width=22, importance=8),),
        "metric": (Column(key="metric", title="loss", width=14, right=True, importance=5),),
        "created": (Column(key="created", title="created", width=9, right=True, importance=2),),
        "detail": (Column(key="detail", title="", width=12, grows=True, importance=4),),
    }
    """The columns of each of ``DEFAULT_COLUMNS``."""

    columns: tuple[str, ...] = DEFAULT_COLUMNS
    """Names of the fields, settings and metrics in the columns after the name of the run."""
    order: str = ""
    """The order of the rows, for the sign at its column; empty for the order of the list."""
    common_metric = "loss"
    """The metric of most rows. It is the column's title; other metrics are named in their cells."""

    def columns_of(self, rows: Sequence[RunRow]) -> Sequence[Column]:
        names = Counter(row.metric_name for row in rows if row.metric_name)
        self.common_metric = max(names, key=lambda n: (names[n], n == "loss"), default="loss")
        shown = [self._titled(self.NAME, "name")]
        for place, name in enumerate(self.columns, 3):
            # The column that the rows are sorted by is among the last ones to be left out.
            importance = 2 if name == self.order.removeprefix("-") else place
            if self.columns == DEFAULT_COLUMNS:
                if name != "tag" or any(row.tags for row in rows):
                    shown += self._own_columns(name)
            elif name in self.OWN_COLUMNS:
                # The bar of progress is the first one to be left out.
                *bar, column = self._own_columns(name)
                shown += [*bar, replace(column, importance=importance)]
            else:
                shown.append(self._text_column(name, rows, importance=importance))
        return shown

    @staticmethod
    def field_of(column: str) -> str:
        """Return the name of the field, setting or metric in a column."""
        return "done" if column == "bar" else column.removeprefix(TEXT_COLUMN)

    def _own_columns(self, name: str) -> list[Column]:
        *others, last = self.OWN_COLUMNS[name]
        if name == "metric":
            last = replace(last, title=self.common_metric)
        return [*others, self._titled(last, name)]

    def _text_column(self, name: str, rows: Sequence[RunRow], *, importance: int) -> Column:
        """Return a column that is as wide as its title and its texts."""
        title = clean_name(name.removeprefix(SETTING), MAX_COLUMN - 2)
        widths = [cell_len(title) + 2, *(cell_len(row.texts.get(name, "")) for row in rows)]
        column = Column(
            key=f"{TEXT_COLUMN}{name}",
            title=title,
            width=min(MAX_COLUMN, max(widths)),
            importance=importance,
            right=kind_of(name) not in (Kind.TEXT, Kind.SETTING, Kind.FLAG),
        )
        return self._titled(column, name)

    def _titled(self, column: Column, name: str) -> Column:
        """Return the column with a sign at its title if the rows are sorted by it."""
        if name != self.order.removeprefix("-"):
            return column
        sign = "↓" if self.order.startswith("-") else "↑"
        return replace(column, title=f"{column.title or name} {sign}")

    def key_of(self, row: RunRow) -> str:
        return row.id

    def cells_of(self, row: RunRow) -> Mapping[str, Cells]:
        done = "" if row.share is None else percent(row.share)
        return {
            "name": (
                row.sign,
                Cell(text="◆" if row.marked else " ", tone=Tone.ACCENT),
                # Before the name: the end of a long one is cut off.
                Cell(text=f"{'★ ' if row.star else ''}{row.name}"),
            ),
            "tag": (Cell(text=row.tags, tone=Tone.DIM),),
            "preset": (Cell(text=row.preset, tone=Tone.DIM),),
            "state": (row.state,),
            "bar": bar_cells(row.share, BAR_WIDTH, Tone.DIM),
            "done": (Cell(text=done),),
            "step": (Cell(text=row.progress, tone=Tone.DIM),),
            "metric": self._metric_cells(row),
            "created": (Cell(text=row.created, tone=Tone.DIM),),
            "detail": (row.note,),
            **{f"{TEXT_COLUMN}{name}": (Cell(text=text),) for name, text in row.texts.items()},
        }

    def _metric_cells(self, row: RunRow) -> Cells:
        if row.metric_name in ("", self.common_metric):
            return (Cell(text=row.metric),)
        return (Cell(text=f"{row.metric_name} ", tone=Tone.DIM), Cell(text=row.metric))
