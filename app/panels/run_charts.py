"""The charts of a run screen and what their keys change: metrics, axis, smoothing, zoom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from ltui.app.live.frame import Frame
from ltui.app.live.metric_history import CurveRequest, LatestCurveRequest
from ltui.app.panels.metric_grid import MetricGrid
from ltui.app.panels.panel import Panel
from ltui.app.preferences import read_preferences, write_preference
from ltui.app.presentation import metric_charts, run_view
from ltui.app.presentation.metric_selection import preference_key
from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import AxisRange
from ltui.widgets.charts.chart import Chart
from ltui.widgets.view_models import ChartViewModel

CHART_S = 0.9
"""Seconds between two repaints of a chart: a new point seldom moves a cell."""
PREFERENCE = "metrics"
"""Name in ``preferences.json``: preset or script -> the metrics chosen for it."""


class RunCharts(Horizontal):
    """Panels 1 and 2 of a run screen. ``show`` draws a frame; the actions are the screen's keys.

    Every chart shows the same part of the x axis and the same crosshair.
    """

    def __init__(self, home: Path, requests: LatestCurveRequest, *, id: str) -> None:  # noqa: A002 - Textual's
        super().__init__(id=id)
        self.settings = metric_charts.ChartSettings()
        self._home, self._requests = home, requests
        self._preference: str | None = None
        """The preset or script whose choice was read."""
        self._frame: Frame | None = None
        self._seen: frozenset[str] = frozenset()
        self._drawn: dict[str, tuple[Any, ...]] = {}
        self._drawn_at: dict[str, float] = {}
        self._waiting = ""

    def compose(self) -> ComposeResult:
        with Panel(1, "metrics", id="loss"):
            yield MetricGrid(id="metric-grid")
        with Panel(2, "throughput", id="throughput"):
            yield Chart(id="throughput-chart")
            yield Static(id="waiting", markup=False)

    def invalidate(self) -> None:
        """Draw everything again with the next frame: a hidden panel has missed frames."""
        self._drawn.clear()

    def show(self, frame: Frame, seen: frozenset[str]) -> None:
        """Draw the panels named in ``seen``."""
        self._frame, self._seen = frame, seen
        self._read_preference(frame)
        self._ask(frame)
        if "loss" in seen and self._is_due("loss", frame):
            view_models = metric_charts.metric_charts(frame, self.settings)
            self.query_one(MetricGrid).show(view_models)
            self._name_metrics(frame, view_models)
        if "throughput" in seen:
            if self._is_due("throughput", frame):
                view_model = metric_charts.throughput_chart(frame, self.settings)
                self.query_one("#throughput-chart", Chart).view_model = view_model
                self._caption("throughput", view_model.title, view_model.subtitle)
            self._draw_waiting(metric_charts.step_time_text(frame))

    def _is_due(self, name: str, frame: Frame) -> bool:
        """Whether a panel shows something else now, and was not drawn just before."""
        quiet = run_view.silence_text(frame)
        waited = None if frame.curves else int(frame.now)
        figures = (metric_charts.throughput_subtitle(frame), frame.snapshot.metrics)
        look = (self.settings, self._view())
        key = (look, frame.curves_version, quiet, figures, waited, frame.snapshot.state)
        drawn = self._drawn.get(name)
        if drawn == key:
            return False
        same_look = drawn is not None and drawn[0] == look
        if same_look and 0 <= frame.now - self._drawn_at.get(name, 0.0) < CHART_S:
            return False
        self._drawn[name], self._drawn_at[name] = key, frame.now
        return True

    def _name_metrics(self, frame: Frame, view_models: Sequence[ChartViewModel]) -> None:
        left_out = self.query_one(MetricGrid).left_out
        more = [f"{left_out} more need room (z: maximise)"] if left_out > 0 else []
        figures = metric_charts.metrics_subtitle(frame, self.settings)
        self._caption("loss", metric_charts.metrics_title(view_models), figures, *more)

    def _caption(self, name: str, title: str, figures: str, *more: str) -> None:
        words = (figures, self._zoom_text(), *more)
        self.query_one(f"#{name}", Panel).set_titles(
            title, " · ".join(word for word in words if word)
        )

    def _zoom_text(self) -> str:
        """``zoomed 4 500-5 000 · home: all``; empty if the whole axis is in view."""
        part = self._range()
        if part is None:
            return ""
        low, high = max(0.0, part.low), part.high
        if self.settings.axis == "time":
            return f"zoomed {formats.duration(low)}-{formats.duration(high)} · home: all"
        digits = formats.count if self.settings.axis == "step" else formats.significant
        return f"zoomed {digits(low)}-{digits(high)} · home: all"

    def _draw_waiting(self, text: str) -> None:
        if text != self._waiting:
            # Only another number of lines moves anything else.
            layout = text.count("\n") != self._waiting.count("\n") or not self._waiting
            self._waiting = text
            self.query_one("#waiting", Static).update(Text(text), layout=layout)

    # -- keys ------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Axis, smoothing, view and scale as they were at the start; the metrics stay."""
        self.settings = metric_charts.ChartSettings(metrics=self.settings.metrics)
        for chart in self.query(Chart):
            chart.view = chart.crosshair = None
            chart.log_y, chart.outliers = None, False
        self._redraw()

    def next_axis(self) -> None:
        self.settings = replace(self.settings, axis=self.settings.next_axis())
        for chart in self.query(Chart):
            # A part in view is a part of the axis before.
            chart.view = chart.crosshair = None
        self._redraw()

    def toggle_log(self) -> None:
        grid = self.query_one(MetricGrid)
        log_y = not grid.query_one("#loss-chart", Chart).is_log
        for chart in grid.query(Chart):
            chart.log_y = log_y

    def toggle_outliers(self) -> None:
        shown = not self.query_one("#loss-chart", Chart).outliers
        for chart in self.query_one(MetricGrid).query(Chart):
            chart.outliers = shown

    def smooth(self, by: int) -> None:
        """More smoothing by so many notches; less where ``by`` is negative."""
        self.settings = replace(self.settings, smoothing=self.settings.next_smoothing(by))
        self._redraw()

    def _redraw(self) -> None:
        if self._frame is not None:
            self.show(self._frame, self._seen)

    # -- metrics ---------------------------------------------------------------------------------

    def choose_metrics(self) -> None:
        """Open the list of metrics, and show those that are chosen there."""
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
            known = read_preferences(self._home).get(PREFERENCE)
            choices = {**(known if isinstance(known, dict) else {}), self._preference: chosen}
            write_preference(self._home, PREFERENCE, {k: v for k, v in choices.items() if v})
        except OSError as error:
            why = error.strerror or str(error)
            self.notify(f"The choice can't be remembered: {why}", severity="warning", markup=False)

    def _read_preference(self, frame: Frame) -> None:
        """Once what runs is known, take the choice that was made for it before."""
        run = frame.snapshot
        key = preference_key(run.preset, run.command)
        if not key or key == self._preference:
            return
        self._preference = key
        known = read_preferences(self._home).get(PREFERENCE)
        names = known.get(key) if isinstance(known, dict) else None
        if isinstance(names, list) and names:
            chosen = tuple(str(name) for name in names)
            self.settings = replace(self.settings, metrics=chosen)

    # -- zoom ------------------------------------------------------------------------------------

    def _ask(self, frame: Frame) -> None:
        """Ask the feed for the curves that are shown, and for detail where a part is in view."""
        part = self._range()
        steps = None
        if part is not None:
            room = part.span / 2
            axis = metric_charts.Axis(self.settings, frame)
            steps = axis.steps_between(part.low - room, part.high + room)
            asked = self._requests.request.steps
            if steps is not None and asked is not None and _serves(asked, steps):
                steps = asked
        chosen = self.settings.metrics and metric_charts.shown_metrics(frame, self.settings)
        self._requests.request = CurveRequest(
            names=frozenset(chosen) if chosen else None, steps=steps
        )

    def _view(self) -> object:
        return self.query_one("#throughput-chart", Chart).view

    def _range(self) -> AxisRange | None:
        """The part of the x axis in view; None for all of it."""
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


def _serves(asked: tuple[int, int], steps: tuple[int, int]) -> bool:
    """Whether the part asked for before holds ``steps`` without their margins, in like detail."""
    margin = (steps[1] - steps[0]) // 4
    inside = asked[0] <= steps[0] + margin and steps[1] - margin <= asked[1]
    return inside and asked[1] - asked[0] <= 3 * (steps[1] - steps[0])
