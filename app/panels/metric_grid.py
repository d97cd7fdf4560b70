"""The charts of the chosen metrics, as many as fit into the panel."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Container

from ltui.widgets.charts.chart import Chart
from ltui.widgets.view_models import ChartViewModel

MAX_CHARTS = 8
MIN_CHART_LINES = 6
"""Minimum lines of a chart: legend, axis and four lines of curves."""
TWO_COLUMNS_FROM = 120
"""Minimum cells of width for two columns of charts."""


class MetricGrid(Container):
    """Up to ``MAX_CHARTS`` charts in one or two columns."""

    DEFAULT_CSS = """
    MetricGrid { layout: grid; grid-size: 1; height: 1fr; width: 1fr; }
    MetricGrid Chart { height: 1fr; }
    """

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._view_models: tuple[ChartViewModel, ...] = ()
        self._shown = 0

    def compose(self) -> ComposeResult:
        yield Chart(id="loss-chart")
        for number in range(1, MAX_CHARTS):
            chart = Chart(id=f"metric-chart-{number}")
            chart.display = False
            yield chart

    @property
    def hidden_charts(self) -> int:
        """Number of charts that do not fit."""
        return len(self._view_models) - self._shown

    def show(self, view_models: Sequence[ChartViewModel]) -> None:
        """Draw the first of the charts, as many as fit."""
        self._view_models = tuple(view_models)
        columns, rows = self._capacity()
        self._shown = max(1, min(len(self._view_models), columns * rows, MAX_CHARTS))
        columns = min(columns, max(1, self._shown - 1))
        if self.styles.grid_size_columns != columns:
            self.styles.grid_size_columns = columns
        charts = list(self.query(Chart))
        for number, chart in enumerate(charts):
            visible = number < self._shown
            if chart.display != visible:
                chart.display = visible
            if visible and number < len(self._view_models):
                chart.view_model = self._view_models[number]

    def on_resize(self, event: events.Resize) -> None:  # noqa: ARG002
        if self._view_models:
            self.show(self._view_models)

    def _capacity(self) -> tuple[int, int]:
        """Return the number of columns and rows that fit."""
        columns = 2 if self.size.width >= TWO_COLUMNS_FROM else 1
        return columns, max(1, self.size.height // MIN_CHART_LINES)
