"""A grid of charts, as many as fit or as many as the user wants."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.markup import escape

from ltui.widgets.charts.chart import Chart
from ltui.widgets.view_models import ChartViewModel

MAX_CHARTS = 8
MIN_CHART_LINES = 6
"""Minimum lines of a chart: legend, axis and four lines of curves."""
TWO_COLUMNS_FROM = 120
"""Minimum cells of width for two columns of charts."""


class GridShape(Struct, frozen=True):
    """Columns and rows of a grid."""

    columns: int
    rows: int

    @property
    def places(self) -> int:
        return self.columns * self.rows


class MetricGrid(Container):
    """Charts in columns and rows."""

    DEFAULT_CSS = """
    MetricGrid { layout: grid; grid-size: 1; height: 1fr; width: 1fr; }
    MetricGrid Chart { height: 1fr; }
    MetricGrid.-titled Chart {
        border-top: solid $border-blurred; border-title-color: $foreground;
    }
    MetricGrid.-titled Chart:focus { border-top: heavy $primary; border-title-style: bold; }
    """

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._view_models: tuple[ChartViewModel, ...] = ()
        self._shape: GridShape | None = None
        self._shown = 0

    def compose(self) -> ComposeResult:
        yield Chart(id="loss-chart")

    @property
    def charts(self) -> list[Chart]:
        """The visible charts, in the order of their view models."""
        return list(self.query(Chart))[: self._shown]

    @property
    def hidden_charts(self) -> int:
        """Number of charts that do not fit."""
        return len(self._view_models) - self._shown

    def show(
        self,
        view_models: Sequence[ChartViewModel],
        shape: GridShape | None = None,
        *,
        titled: bool = False,
    ) -> None:
        """Draw the first of the charts: as many as ``shape`` has places, or as many as fit.

        With ``titled`` each chart has its title above it.
        """
        self.set_class(titled, "-titled")
        self._view_models, self._shape = tuple(view_models), shape
        places = shape or self._capacity()
        most = places.places if shape else min(places.places, MAX_CHARTS)
        self._shown = max(1, min(len(self._view_models), most))
        columns = places.columns if shape else min(places.columns, max(1, self._shown - 1))
        if self.styles.grid_size_columns != columns:
            self.styles.grid_size_columns = columns
        rows = places.rows if shape else 0
        if self.styles.grid_size_rows != rows:
            self.styles.grid_size_rows = rows
        charts = list(self.query(Chart))
        for number in range(len(charts), self._shown):
            charts.append(Chart(id=f"metric-chart-{number}"))
            # A new chart shows the part of the x axis that the others show.
            charts[-1].set_reactive(Chart.view, charts[0].view)
            self.mount(charts[-1])
        for number, chart in enumerate(charts):
            visible = number < self._shown
            if chart.display != visible:
                chart.display = visible
            if visible and number < len(self._view_models):
                self._draw(chart, self._view_models[number])

    def _draw(self, chart: Chart, view_model: ChartViewModel) -> None:
        chart.view_model = view_model
        title = escape(view_model.title) if self.has_class("-titled") else None
        if chart.border_title != title:
            chart.border_title = title

    def on_resize(self, event: events.Resize) -> None:  # noqa: ARG002
        if self._view_models:
            self.show(self._view_models, self._shape, titled=self.has_class("-titled"))

    def _capacity(self) -> GridShape:
        columns = 2 if self.size.width >= TWO_COLUMNS_FROM else 1
        return GridShape(columns, max(1, self.size.height // MIN_CHART_LINES))
