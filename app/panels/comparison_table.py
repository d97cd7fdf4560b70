"""A table of a comparison, whose columns depend on the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.binding import BindingType

from ltui.app.compare.view_settings import TableRow, TableView
from ltui.widgets.columns import Cells, Column
from ltui.widgets.make_bindings import bindings
from ltui.widgets.table import Table


class ComparisonTable(Table[TableRow]):
    """Rows of runs, groups or settings."""

    NOTE: ClassVar[str] = "reading the runs"

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._view = TableView((), ())

    @property
    def sort_keys(self) -> list[str]:
        """The keys of the columns by which the rows can be sorted."""
        keys = (column.key for column in self._view.columns)
        return [key for key in keys if key not in ("sign", "band", "state")]

    def show(self, view: TableView) -> None:
        """Show the rows of ``view``."""
        if view != self._view:
            self._view = view
            self.set_rows(view.rows)

    def columns_of(self, rows: Sequence[TableRow]) -> Sequence[Column]:  # noqa: ARG002 - the table's
        return self._view.columns or (Column(key="", title="", width=1),)

    def key_of(self, row: TableRow) -> str:
        return row.key

    def line_of(self, row: TableRow) -> Cells | None:
        return row.line

    def cells_of(self, row: TableRow) -> Mapping[str, Cells]:
        return row.cells


class SettingsTable(ComparisonTable):
    """The settings, with a column for each run, which can be scrolled to."""

    SCROLLS_SIDEWAYS: ClassVar[bool] = True
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "settings",
        """
        left  | sideways(-1) | runs left  | Scroll to runs on the left
        right | sideways(1)  | runs right | Scroll to those on the right; shift+wheel
        """,
    )
