"""The two charts of a run screen and what their keys change: axis, smoothing, scale, crosshair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from ltui.app import charts, translate
from ltui.app.frame import Frame
from ltui.app.screens.panel import Panel
from ltui.widgets.chart import Chart
from ltui.widgets.shapes import ChartShape

CHART_S = 0.9
"""Seconds between two repaints of a chart: a new point seldom moves a cell."""


class RunCharts(Horizontal):
    """Panels 1 and 2 of a run screen. ``show`` draws a frame; the actions are the screen's keys."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self.settings = charts.ChartSettings()
        self._frame: Frame | None = None
        self._seen: frozenset[str] = frozenset()
        self._drawn: dict[str, tuple[Any, ...]] = {}
        self._drawn_at: dict[str, float] = {}
        self._waiting = ""

    def compose(self) -> ComposeResult:
        with Panel(1, "loss", id="loss"):
            yield Chart(id="loss-chart")
        with Panel(2, "throughput", id="throughput"):
            yield Chart(id="throughput-chart")
            yield Static(id="waiting", markup=False)

    def forget_drawn(self) -> None:
        """Draw everything again with the next frame: a hidden panel has missed frames."""
        self._drawn.clear()

    def show(self, frame: Frame, seen: frozenset[str]) -> None:
        """Draw the panels named in ``seen``."""
        self._frame, self._seen = frame, seen
        if "loss" in seen:
            self._draw("loss", charts.loss_chart, frame)
        if "throughput" in seen:
            self._draw("throughput", charts.throughput_chart, frame)
            self._draw_waiting(charts.waiting_text(frame))

    def _draw(
        self, name: str, make: Callable[[Frame, charts.ChartSettings], ChartShape], frame: Frame
    ) -> None:
        quiet = translate.silence(frame)
        waited = None if frame.curves else int(frame.now)
        figures = (charts.throughput_figures(frame), frame.snapshot.metrics)
        key = (frame.curves_version, self.settings, quiet, figures, waited, frame.snapshot.state)
        if self._drawn.get(name) == key:
            return
        drawn_at = self._drawn_at.get(name, 0.0)
        same_look = self._drawn.get(name, (None, None))[1] == self.settings
        if same_look and 0 <= frame.now - drawn_at < CHART_S:
            return
        self._drawn[name] = key
        self._drawn_at[name] = frame.now
        shape = make(frame, self.settings)
        self.query_one(f"#{name}-chart", Chart).shape = shape
        self.query_one(f"#{name}", Panel).say(shape.title, shape.subtitle)

    def _draw_waiting(self, text: str) -> None:
        if text != self._waiting:
            # Only another number of lines moves anything else.
            layout = text.count("\n") != self._waiting.count("\n") or not self._waiting
            self._waiting = text
            self.query_one("#waiting", Static).update(Text(text), layout=layout)

    # -- keys ------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Settings, view and scale as they were at the start."""
        self.settings = charts.ChartSettings()
        for chart in self.query(Chart):
            chart.action_show_all()
            chart.log_y = None

    def next_axis(self) -> None:
        self.settings = replace(self.settings, axis=self.settings.next_axis())
        for chart in self.query(Chart):
            # A part in view is a part of the axis before.
            chart.action_show_all()
            chart.crosshair = None
        self._redraw()

    def toggle_log(self) -> None:
        self.query_one("#loss-chart", Chart).action_toggle_log()

    def smooth(self, by: int) -> None:
        """More smoothing by so many notches; less where ``by`` is negative."""
        self.settings = replace(self.settings, smoothing=self.settings.smoother(by))
        self._redraw()

    def _redraw(self) -> None:
        if self._frame is not None:
            self.show(self._frame, self._seen)

    @on(Chart.CrosshairMoved)
    def _link_crosshairs(self, message: Chart.CrosshairMoved) -> None:
        for chart in self.query(Chart):
            if chart is not message.chart and chart.crosshair != message.x:
                chart.set_reactive(Chart.crosshair, message.x)
                chart.refresh()
