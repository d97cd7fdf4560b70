"""The widgets of a comparison of runs: its tables and its parallel coordinates.

The columns of the tables depend on the runs. ``parallel_plot`` draws the parallel coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message

from ltui.app.compare.comparison_tables import TableRow, TableView
from ltui.widgets.charts.canvas import Canvas, CanvasWidget
from ltui.widgets.charts.chart import Chart
from ltui.widgets.charts.parallel_plot import ParallelViewModel, nearest_line, parallel_plot
from ltui.widgets.columns import Cells, Column
from ltui.widgets.make_bindings import bindings
from ltui.widgets.table import Table

if TYPE_CHECKING:
    from ltui.widgets.charts.picture import Picture


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


class ParallelChart(CanvasWidget):
    """One vertical axis for each quantity, and a line for each run."""

    DEFAULT_CSS = """
    ParallelChart { height: 1fr; width: 1fr; min-height: 4; }
    """

    @dataclass
    class LineClicked(Message):
        """A click near the line with this key."""

        key: str

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._view_model = ParallelViewModel()
        self._highlighted: frozenset[str] = frozenset()
        self._first = 0
        """Number of the first visible axis."""
        self._canvas: Canvas | None = None
        self._drawn: tuple[object, ...] = ()

    def show(self, view_model: ParallelViewModel, highlighted: Collection[str]) -> None:
        """Draw the lines, those with a key in ``highlighted`` on top."""
        if (view_model, frozenset(highlighted)) != (self._view_model, self._highlighted):
            self._view_model, self._highlighted = view_model, frozenset(highlighted)
            self.refresh()

    def move(self, by: int) -> None:
        """Show the axes that are ``by`` places further to the right."""
        self._first = self._view_model.first_axis(self._first + by, self.size.width)
        self.refresh()

    def _part(self) -> ParallelViewModel:
        if not self._view_model.axes:
            return self._view_model
        width = self.size.width
        return self._view_model.part(self._view_model.first_axis(self._first, width), width)

    def _current_canvas(self) -> Canvas:
        width, height = self.size
        drawn = (self._view_model, self._highlighted, self._first, width, height, self.app.no_color)
        if self._canvas is None or drawn != self._drawn:
            self._canvas = parallel_plot(
                self._part(),
                width,
                height,
                highlighted=self._highlighted,
                dashes=self.app.no_color,
            )
            self._drawn = drawn
        return self._canvas

    @property
    def export_title(self) -> str:
        """The metric of the last axis, with the word parameters."""
        return f"parameters, {self._view_model.axes[-1].title}"

    def plain_text(self) -> str:
        """Return the visible axes as text."""
        return self._current_canvas().text()

    def picture(self, title: str) -> Picture:
        """Return all axes as a picture."""
        # Imported here: pictures are needed only when one is saved.
        from ltui.widgets.charts.picture import parallel_picture

        return parallel_picture(self._view_model, title, self._highlighted)

    def action_export(self, form: str) -> None:
        if self._view_model.is_drawable:
            self.post_message(Chart.ExportRequested(self, form))

    def on_click(self, event: events.Click) -> None:
        key = nearest_line(self._part(), *self.size, event.x, event.y)
        if key is not None:
            self.post_message(self.LineClicked(key))
