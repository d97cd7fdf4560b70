"""The table of runs on the home screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.binding import BindingType

from ltui.app.runs.run_fields import Kind, kind_of
from ltui.app.runs.run_rows import DEFAULT_COLUMNS, RunRow
from ltui.widgets.columns import Cells, Column
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name
from ltui.widgets.table import Table
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

TEXT_COLUMN = "text "
"""Prefix of the keys of chosen columns, as a metric could have the name of another column."""
MAX_COLUMN = 24
"""Maximum width of a chosen column."""
LEAST_TEXT = 12
"""Minimum width of a text that is cut because the table has no room for it."""
MAX_TITLE = 30
"""Maximum characters of a title: it is the name that filters and sorting use."""
WIDTHS = {
    "name": (12, 20),
    "state": (9, 24),
    "progress": (13, 22),
    "metric": (9, 18),
    "program": (8, 24),
    "tag": (4, 16),
    "created": (9, 9),
    "detail": (6, 18),
}
"""The columns with cells of their own, and the minimum and maximum width of each."""


class RunsTable(Table[RunRow]):
    """A table with one row for each run. The cursor stays on its run when the rows change."""

    NOTE: ClassVar[str] = "No runs yet. N starts one."
    SCROLLS_SIDEWAYS: ClassVar[bool] = True
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "runs",
        """
        R        | screen.rerun    | run again | Start a new run with the settings of this one
        o        | screen.sort     | sort      | Sort runs by the next column
        O        | screen.reverse  | reverse   | Reverse the order of the runs
        m        | screen.columns  | columns   | Choose columns and order: fields, metrics, settings
        space    | screen.mark     | mark      | Mark the run for the keys that act on several runs
        a        | screen.mark_all | mark all  | Mark all listed runs, or remove their marks
        left     | sideways(-1)    | columns left  | Scroll to columns on the left
        right    | sideways(1)     | columns right | Scroll to those on the right; shift+wheel
        [Marked runs, or the selected one]
        C        | screen.compare        | compare | Compare curves and settings of marked runs
        s        | screen.stop           | stop    | Stop; the question names what is saved
        r        | screen.resume         | resume  | Resume; one run with changes if wanted
        asterisk | screen.star           | star    | Give or take away the star
        E        | screen.label('name')  | rename  | Give the run another name, with any characters
        T        | screen.label('tags')  | tags    | Add and remove tags
        G        | screen.label('group') | group   | Set the group
        n        | screen.label('note')  | note    | Write a note
        u        | screen.undo           | undo    | Undo the last change of labels or deletion
        x        | screen.export         | export  | Export the metrics to a file
        delete,D | screen.delete         | delete  | Delete; asks first, u restores
        """,
    )
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    """Names of the fields, settings and metrics in the columns after the name of the run."""
    order: str = ""
    """The order of the rows, for the sign at its column; empty for the order of the list."""
    common_metric = ""
    """The metric of most rows. It is the column's title; other metrics are named in their cells."""

    def columns_of(self, rows: Sequence[RunRow]) -> Sequence[Column]:
        names = Counter(row.metric_name for row in rows if row.metric_name)
        self.common_metric = max(names, key=lambda n: (names[n], n), default="metric")
        cells = [self.cells_of(row) for row in rows]
        return [self._column(name, cells) for name in ("name", *self.columns)]

    def _column(self, name: str, rows: Sequence[Mapping[str, Cells]]) -> Column:
        """Return a column that is as wide as its title and its texts, as far as the limits of its
        kind allow, and how wide it would have to be for all of them."""
        key = name if name in WIDTHS else f"{TEXT_COLUMN}{name}"
        title = clean_name(self.common_metric if name == "metric" else name, MAX_TITLE)
        if name == self.order.removeprefix("-"):
            title += " ↓" if self.order.startswith("-") else " ↑"
        texts = (sum(cell_len(cell.text) for cell in row.get(key, ())) for row in rows)
        full = max([cell_len(title), *texts])
        least, most = WIDTHS.get(name, (0, MAX_COLUMN))
        width = max(cell_len(title), min(most, max(least, full)))
        right = kind_of(name) not in (Kind.TEXT, Kind.SETTING, Kind.FLAG) and name != "progress"
        return Column(
            key=key,
            title=title,
            width=width,
            # A number is never cut.
            least=0 if right else max(least, cell_len(title), min(LEAST_TEXT, width)),
            full=max(width, full),
            right=right,
        )

    @staticmethod
    def field_of(column: str) -> str:
        """Return the name of the field, setting or metric in a column."""
        return column.removeprefix(TEXT_COLUMN)

    def key_of(self, row: RunRow) -> str:
        return row.id

    def cells_of(self, row: RunRow) -> Mapping[str, Cells]:
        return {
            "name": (
                row.sign,
                Cell(text="◆" if row.marked else " ", tone=Tone.ACCENT),
                # Before the name: the end of a long one is cut off.
                Cell(text=f"{'★ ' if row.star else ''}{row.name}"),
            ),
            "tag": (Cell(text=row.tags, tone=Tone.DIM),),
            "program": (Cell(text=row.program, tone=Tone.DIM),),
            "state": (row.state,),
            "progress": (Cell(text=row.progress),),
            "metric": self._metric_cells(row),
            "created": (Cell(text=row.created, tone=Tone.DIM),),
            "detail": (row.note,),
            **{f"{TEXT_COLUMN}{name}": (Cell(text=text),) for name, text in row.texts.items()},
        }

    def _metric_cells(self, row: RunRow) -> Cells:
        if row.metric_name in ("", self.common_metric):
            return (Cell(text=row.metric),)
        return (Cell(text=f"{row.metric_name} ", tone=Tone.DIM), Cell(text=row.metric))
