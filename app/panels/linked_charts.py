"""Charts that show the same part of the x axis and the same crosshair, and their settings.

The settings are remembered for the preset or script. A grid has as many charts as fit, or as many
as the user wants.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Container
from textual.markup import escape

from ltui.app.live.curve_arithmetic import CurveRequest, LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.presentation import metric_pages
from ltui.app.presentation.chart_axis import Axis
from ltui.app.presentation.metric_charts import ChartSettings
from ltui.app.presentation.metric_names import preference_key
from ltui.app.presentation.metric_pages import MetricOrder, MetricPages, pages_from_json
from ltui.app.settings import read_script_preferences, write_script_preferences
from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import AxisRange
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


PREFERENCE = "charts"
"""Key in ``preferences.json`` of a mapping from preset or script to axis and smoothing."""


class LinkedCharts(Container):
    """A container of charts. Its methods change all of them."""

    def __init__(self, home: Path, requests: LatestCurveRequest, *, id: str) -> None:  # noqa: A002 - Textual's
        super().__init__(id=id)
        self.settings = ChartSettings()
        self._home, self._requests = home, requests
        self._script = ""
        """The preset or script of the run; empty until it is known."""
        self._frame: Frame | None = None
        self.pages = MetricPages()
        """What the user chose on the screen of all metrics."""
        self._order = MetricOrder()

    @abstractmethod
    def redraw(self) -> None:
        """Draw the charts again, because the settings or the visible part changed."""

    # -- what is remembered ------------------------------------------------------------------------

    def use_remembered(self, remembered: Mapping[str, Any]) -> None:
        """Use what was chosen before for this preset or script, by key."""
        self.settings = self.settings.with_json(remembered.get(PREFERENCE))
        self.pages = pages_from_json(remembered.get(metric_pages.PREFERENCE))

    def read_preferences(self, frame: Frame) -> None:
        """Use what was chosen before, once the preset or script of the run is known."""
        run = frame.snapshot
        script = preference_key(run.preset, run.command)
        if script and script != self._script:
            self._script = script
            self.use_remembered(read_script_preferences(self._home, self._script))

    def remember(self, choices: Mapping[str, Any]) -> None:
        """Remember choices by their keys."""
        if not self._script:
            return
        try:
            write_script_preferences(self._home, self._script, choices)
        except OSError as error:
            reason = error.strerror or str(error)
            self.notify(
                f"The choice can't be remembered: {reason}", severity="warning", markup=False
            )

    def adopt(self, other: LinkedCharts) -> None:
        """Use the axis, the smoothing and the pages of the charts of another screen."""
        self.pages = other.pages
        axis, smoothing = other.settings.axis, other.settings.smoothing
        settings = replace(self.settings, axis=axis, smoothing=smoothing)
        if settings != self.settings:
            self._use_settings(settings)

    def _use_settings(self, settings: ChartSettings) -> None:
        if settings.axis != self.settings.axis:
            # The zoomed part was a part of the previous axis.
            show_whole_axis(self.query(Chart))
        self.settings = settings
        self.redraw()
        self.remember({PREFERENCE: settings.to_json()})

    # -- what the keys change ----------------------------------------------------------------------

    def reset(self) -> None:
        """Restore the default axis, smoothing, zoom and scale."""
        default = ChartSettings()
        show_whole_axis(self.query(Chart))
        for chart in self.query(Chart):
            chart.log_y, chart.outliers = None, False
        self._use_settings(replace(self.settings, axis=default.axis, smoothing=default.smoothing))

    def next_axis(self) -> None:
        self._use_settings(replace(self.settings, axis=self.settings.next_axis()))

    def scaled_charts(self) -> list[Chart]:
        """Return the charts whose y axis the keys change."""
        return list(self.query(Chart))

    def toggle_log(self) -> None:
        toggle_log(self.scaled_charts())

    def toggle_outliers(self) -> None:
        toggle_outliers(self.scaled_charts())

    def smooth(self, by: int) -> None:
        """Increase the smoothing by ``by`` levels; a negative number decreases it."""
        smoothing = self.settings.next_smoothing(by)
        self._use_settings(replace(self.settings, smoothing=smoothing))

    # -- the visible part --------------------------------------------------------------------------

    def request_curves(self, frame: Frame, names: frozenset[str] | None) -> None:
        """Request curves, and their detail for the zoomed part."""
        part = self.visible_part()
        steps = None
        if part is not None:
            margin = part.span / 2
            axis = Axis(self.settings.axis, frame)
            steps = axis.steps_between(part.low - margin, part.high + margin)
            requested = self._requests.request.steps
            if steps is not None and requested is not None and _covers(requested, steps):
                steps = requested
        self._requests.request = CurveRequest(names=names, steps=steps)

    def visible_part(self) -> AxisRange | None:
        """Return the visible part of the x axis; None for the whole axis."""
        for chart in self.query(Chart):
            if chart.display and (part := chart.zoomed_range()) is not None:
                return part
        return None

    def zoom_text(self) -> str:
        """Return ``zoomed 4 500-5 000 · home: all``; empty if the whole axis is visible."""
        part = self.visible_part()
        if part is None:
            return ""
        if self.settings.axis == "clock":
            low, high = (f"{datetime.fromtimestamp(end):%H:%M:%S}" for end in (part.low, part.high))
            return f"zoomed {low}-{high} · home: all"
        digits: Callable[[float], str] = formats.count
        if self.settings.axis in ("time", "epoch"):
            digits = formats.duration if self.settings.axis == "time" else formats.significant
        return f"zoomed {digits(max(0.0, part.low))}-{digits(part.high)} · home: all"

    @on(Chart.ViewChanged)
    def _link_views(self, message: Chart.ViewChanged) -> None:
        message.stop()
        link_view(self.query(Chart), message)
        self.redraw()

    @on(Chart.CrosshairMoved)
    def _link_crosshairs(self, message: Chart.CrosshairMoved) -> None:
        message.stop()
        link_crosshair(self.query(Chart), message)


def show_whole_axis(charts: Iterable[Chart]) -> None:
    """Show the whole x axis, without a crosshair."""
    for chart in charts:
        chart.view = chart.crosshair = None


def toggle_log(charts: Sequence[Chart]) -> None:
    """Switch all charts to the scale that the first one does not have."""
    log_y = not any(chart.is_log for chart in charts[:1])
    for chart in charts:
        chart.log_y = log_y


def toggle_outliers(charts: Sequence[Chart]) -> None:
    """Show all values in all charts, or cut outliers, whichever the first one does not do."""
    outliers = not any(chart.outliers for chart in charts[:1])
    for chart in charts:
        chart.outliers = outliers


def link_view(charts: Iterable[Chart], message: Chart.ViewChanged) -> None:
    """Show the part of the x axis that one chart shows in the others, too."""
    for chart in charts:
        if chart is not message.chart:
            chart.view = message.view


def link_crosshair(charts: Iterable[Chart], message: Chart.CrosshairMoved) -> None:
    """Show the crosshair of one chart in the others, too."""
    for chart in charts:
        if chart is not message.chart and chart.crosshair != message.x:
            chart.set_reactive(Chart.crosshair, message.x)
            chart.refresh()


def _covers(requested: tuple[int, int], steps: tuple[int, int]) -> bool:
    """Return True if the previous request still covers ``steps`` in similar detail.

    ``steps`` includes margins, which need not be covered.
    """
    margin = (steps[1] - steps[0]) // 4
    inside = requested[0] <= steps[0] + margin and steps[1] - margin <= requested[1]
    return inside and requested[1] - requested[0] <= 3 * (steps[1] - steps[0])
