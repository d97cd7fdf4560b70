"""Charts of the chosen metrics, one for each quantity, as many as the panel has room for."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Container

from ltui.widgets.charts.chart import Chart
from ltui.widgets.view_models import ChartViewModel

MOST_CHARTS = 8
CHART_LINES = 6
"""Lines below which a chart says little: legend, axis and four lines of curve."""
TWO_COLUMNS_FROM = 120


class MetricGrid(Container):
    """Up to ``MOST_CHARTS`` charts above or beside each other."""

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
        for number in range(1, MOST_CHARTS):
            chart = Chart(id=f"metric-chart-{number}")
            chart.display = False
            yield chart

    @property
    def left_out(self) -> int:
        """Charts that there is no room for."""
        return len(self._view_models) - self._shown

    def show(self, view_models: Sequence[ChartViewModel]) -> None:
        self._view_models = tuple(view_models)
        columns, rows = self._room()
        self._shown = max(1, min(len(self._view_models), columns * rows, MOST_CHARTS))
        columns = min(columns, max(1, self._shown - 1))
        if self.styles.grid_size_columns != columns:
            self.styles.grid_size_columns = columns
        charts = list(self.query(Chart))
        for number, chart in enumerate(charts):
            seen = number < self._shown
            if chart.display != seen:
                chart.display = seen
            if seen and number < len(self._view_models):
                chart.view_model = self._view_models[number]

    def on_resize(self, event: events.Resize) -> None:  # noqa: ARG002
        if self._view_models:
            self.show(self._view_models)

    def _room(self) -> tuple[int, int]:
        columns = 2 if self.size.width >= TWO_COLUMNS_FROM else 1
        return columns, max(1, self.size.height // CHART_LINES)
