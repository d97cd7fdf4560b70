"""Charts that show the same part of the x axis and the same crosshair, and their settings.

The settings are remembered for the preset or script.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from textual import on
from textual.containers import Container

from ltui.app.live.curve_arithmetic import CurveRequest, LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.preferences import read_script_preferences, write_script_preferences
from ltui.app.presentation.chart_axis import Axis
from ltui.app.presentation.metric_charts import ChartSettings
from ltui.app.presentation.metric_list import preference_key
from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import AxisRange
from ltui.widgets.charts.chart import Chart

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

    @abstractmethod
    def redraw(self) -> None:
        """Draw the charts again, because the settings or the visible part changed."""

    # -- what is remembered ------------------------------------------------------------------------

    def use_remembered(self, remembered: Mapping[str, Any]) -> None:
        """Use what was chosen before for this preset or script, by key."""
        self.settings = self.settings.with_json(remembered.get(PREFERENCE))

    def read_preferences(self, frame: Frame) -> None:
        """Use what was chosen before, once the preset or script of the run is known."""
        run = frame.snapshot
        script = preference_key(run.preset, run.command)
        if script and script != self._script:
            self._script = script
            self.use_remembered(self.remembered())

    def remembered(self) -> dict[str, Any]:
        """Return what is remembered for the preset or script, by key."""
        return read_script_preferences(self._home, self._script)

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
        """Use the axis and the smoothing of the charts of another screen."""
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
