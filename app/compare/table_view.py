"""The columns and rows of a table of a comparison. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len

from ltui.app.compare.view_settings import ViewSettings
from ltui.widgets.columns import Cells, Column

MAX_NAME = 24
"""Maximum cells of the name of a run or a setting in a table."""
MAX_VALUE = 16
"""Maximum cells of the value of a setting in a table."""


class TableRow(Struct, frozen=True):
    """One row of a table, with its cells by the keys of the columns."""

    key: str
    cells: dict[str, Cells]
    line: Cells | None = None
    """A line over all columns in place of the cells."""


class TableView(Struct, frozen=True):
    """The columns and rows of a table."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]


def sized(head: Column, rows: Sequence[TableRow], settings: ViewSettings | None = None) -> Column:
    """Return a column that is as wide as its longest text; ``▾`` is the order of the rows."""
    title = head.title
    if settings is not None and head.key == settings.order:
        title = f"{title} {'▴' if settings.reversed else '▾'}"
    widths = [sum(cell_len(cell.text) for cell in row.cells.get(head.key, ())) for row in rows]
    return replace(head, title=title, width=max([cell_len(title), *widths, 1]))
