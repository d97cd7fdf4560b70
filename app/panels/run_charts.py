"""The chart panels of a run screen, and what their keys change: metrics, axis, smoothing, zoom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal

from ltui.app.live.frame import Frame
from ltui.app.live.metric_history import CurveRequest, LatestCurveRequest
from ltui.app.panels.live_text import LiveText
from ltui.app.panels.metric_grid import MetricGrid
from ltui.app.panels.panel import Panel
from ltui.app.preferences import read_preferences, write_preference
from ltui.app.presentation import metric_charts, run_view
from ltui.app.presentation.metric_list import preference_key
from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import AxisRange
from ltui.widgets.charts.chart import Chart
from ltui.widgets.view_models import ChartViewModel

CHART_S = 0.9
"""Minimum seconds between two repaints of a chart: a new point seldom changes a cell."""
PREFERENCE = "metrics"
"""Key in ``preferences.json`` of a mapping from preset or script to its chosen metrics."""


class RunCharts(Horizontal):
    """Panels 1 and 2 of a run screen: metrics and throughput.

    All charts show the same part of the x axis and the same crosshair.
    """

    def __init__(self, home: Path, requests: LatestCurveRequest, *, id: str) -> None:  # noqa: A002 - Textual's
        super().__init__(id=id)
        self.settings = metric_charts.ChartSettings()
        self._home, self._requests = home, requests
        self._preference: str | None = None
        """The preset or script for which the chosen metrics were read."""
        self._frame: Frame | None = None
        self._visible: frozenset[str] = frozenset()
        self._drawn: dict[str, tuple[Any, ...]] = {}
        """The content from which each panel was drawn, by panel name."""
        self._drawn_at: dict[str, float] = {}

    def compose(self) -> ComposeResult:
        with Panel(1, "metrics", id="loss"):
            yield MetricGrid(id="metric-grid")
        with Panel(2, "throughput", id="throughput"):
            yield Chart(id="throughput-chart")
            yield LiveText(id="waiting")

    def invalidate(self) -> None:
        """Draw everything again with the next frame, because hidden panels have missed frames."""
        self._drawn.clear()

    def show(self, frame: Frame, visible: frozenset[str]) -> None:
        """Draw the panels with their names in ``visible``."""
        self._frame, self._visible = frame, visible
        self._read_preference(frame)
        self._request_curves(frame)
        if "loss" in visible and self._is_due("loss", frame):
            view_models = metric_charts.metric_charts(frame, self.settings)
            self.query_one(MetricGrid).show(view_models)
            self._caption_metrics(frame, view_models)
        if "throughput" in visible:
            if self._is_due("throughput", frame):
                view_model = metric_charts.throughput_chart(frame, self.settings)
                self.query_one("#throughput-chart", Chart).view_model = view_model
                self._caption("throughput", view_model.title, view_model.subtitle)
            waiting = Text(metric_charts.step_time_text(frame))
            self.query_one("#waiting", LiveText).show(waiting)

    def _is_due(self, name: str, frame: Frame) -> bool:
        """Return True if a panel must be drawn: it changed, and was not drawn just before."""
        silence = run_view.silence_text(frame)
        waited = None if frame.curves else int(frame.now)
        figures = (metric_charts.throughput_subtitle(frame), frame.snapshot.metrics)
        options = (self.settings, self.query_one("#throughput-chart", Chart).view)
        content = (options, frame.curves_version, silence, figures, waited, frame.snapshot.state)
        drawn = self._drawn.get(name)
        if drawn == content:
            return False
        same_options = drawn is not None and drawn[0] == options
        if same_options and 0 <= frame.now - self._drawn_at.get(name, 0.0) < CHART_S:
            return False
        self._drawn[name], self._drawn_at[name] = content, frame.now
        return True

    def _caption_metrics(self, frame: Frame, view_models: Sequence[ChartViewModel]) -> None:
        hidden = self.query_one(MetricGrid).hidden_charts
        more = [f"{hidden} more need room (z: maximise)"] if hidden > 0 else []
        figures = metric_charts.metrics_subtitle(frame, self.settings)
        self._caption("loss", metric_charts.metrics_title(view_models), figures, *more)

    def _caption(self, name: str, title: str, figures: str, *more: str) -> None:
        parts = (figures, self._zoom_text(), *more)
        self.query_one(f"#{name}", Panel).set_titles(
            title, " · ".join(part for part in parts if part)
        )

    def _zoom_text(self) -> str:
        """Return ``zoomed 4 500-5 000 · home: all``; empty if the whole axis is visible."""
        part = self._range()
        if part is None:
            return ""
        low, high = max(0.0, part.low), part.high
        if self.settings.axis == "time":
            return f"zoomed {formats.duration(low)}-{formats.duration(high)} · home: all"
        digits = formats.count if self.settings.axis == "step" else formats.significant
        return f"zoomed {digits(low)}-{digits(high)} · home: all"

    # -- keys ------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Restore the default axis, smoothing, zoom and scale; the chosen metrics stay."""
        self.settings = metric_charts.ChartSettings(metrics=self.settings.metrics)
        for chart in self.query(Chart):
            chart.view = chart.crosshair = None
            chart.log_y, chart.outliers = None, False
        self._redraw()

    def next_axis(self) -> None:
        self.settings = replace(self.settings, axis=self.settings.next_axis())
        for chart in self.query(Chart):
            # The zoomed part was a part of the previous axis.
            chart.view = chart.crosshair = None
        self._redraw()

    def toggle_log(self) -> None:
        grid = self.query_one(MetricGrid)
        log_y = not grid.query_one("#loss-chart", Chart).is_log
        for chart in grid.query(Chart):
            chart.log_y = log_y

    def toggle_outliers(self) -> None:
        outliers = not self.query_one("#loss-chart", Chart).outliers
        for chart in self.query_one(MetricGrid).query(Chart):
            chart.outliers = outliers

    def smooth(self, by: int) -> None:
        """Increase the smoothing by ``by`` levels; a negative number decreases it."""
        self.settings = replace(self.settings, smoothing=self.settings.next_smoothing(by))
        self._redraw()

    def _redraw(self) -> None:
        if self._frame is not None:
            self.show(self._frame, self._visible)

    # -- metrics ---------------------------------------------------------------------------------

    def choose_metrics(self) -> None:
        """Open the list of metrics, and show the chosen ones."""
        # Imported here: the first screen of a run does not need it.
        from ltui.app.screens.metric_chooser import MetricChooser

        frame = self._frame
        if frame is None or not frame.curve_names:
            self.notify("No metric has been logged yet.", timeout=3)
            return
        values = {name: value.last for name, value in frame.snapshot.metrics.items()}
        chosen = metric_charts.shown_metrics(frame, self.settings)
        self.app.push_screen(MetricChooser(frame.curve_names, values, chosen), self._use_metrics)

    def show_metric(self, name: str) -> None:
        """Show one more metric until the screen is closed."""
        frame = self._frame
        shown = metric_charts.shown_metrics(frame, self.settings) if frame is not None else ()
        if name not in shown:
            self.settings = replace(self.settings, metrics=(*shown, name))
            self._redraw()

    def _use_metrics(self, chosen: tuple[str, ...] | None) -> None:
        if chosen is None:
            return
        self.settings = replace(self.settings, metrics=chosen or None)
        self._redraw()
        if not self._preference:
            return
        try:
            stored = read_preferences(self._home).get(PREFERENCE)
            choices = {**(stored if isinstance(stored, dict) else {}), self._preference: chosen}
            write_preference(self._home, PREFERENCE, {k: v for k, v in choices.items() if v})
        except OSError as error:
            reason = error.strerror or str(error)
            self.notify(
                f"The choice can't be remembered: {reason}", severity="warning", markup=False
            )

    def _read_preference(self, frame: Frame) -> None:
        """Use the metrics that were chosen before for this preset or script, once it is known."""
        run = frame.snapshot
        key = preference_key(run.preset, run.command)
        if not key or key == self._preference:
            return
        self._preference = key
        stored = read_preferences(self._home).get(PREFERENCE)
        names = stored.get(key) if isinstance(stored, dict) else None
        if isinstance(names, list) and names:
            chosen = tuple(str(name) for name in names)
            self.settings = replace(self.settings, metrics=chosen)

    # -- zoom ------------------------------------------------------------------------------------

    def _request_curves(self, frame: Frame) -> None:
        """Request the curves that are shown, and their detail for the zoomed part."""
        part = self._range()
        steps = None
        if part is not None:
            margin = part.span / 2
            axis = metric_charts.Axis(self.settings, frame)
            steps = axis.steps_between(part.low - margin, part.high + margin)
            requested = self._requests.request.steps
            if steps is not None and requested is not None and _covers(requested, steps):
                steps = requested
        chosen = self.settings.metrics and metric_charts.shown_metrics(frame, self.settings)
        self._requests.request = CurveRequest(
            names=frozenset(chosen) if chosen else None, steps=steps
        )

    def _range(self) -> AxisRange | None:
        """Return the visible part of the x axis; None for the whole axis."""
        for chart in self.query(Chart):
            if chart.display and (part := chart.zoomed_range()) is not None:
                return part
        return None

    @on(Chart.ViewChanged)
    def _link_views(self, message: Chart.ViewChanged) -> None:
        message.stop()
        for chart in self.query(Chart):
            if chart is not message.chart:
                chart.view = message.view
        self._redraw()

    @on(Chart.CrosshairMoved)
    def _link_crosshairs(self, message: Chart.CrosshairMoved) -> None:
        message.stop()
        for chart in self.query(Chart):
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
