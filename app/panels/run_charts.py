"""The chart panels of a run screen, and what their keys change: metrics, axis, smoothing, zoom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.text import Text
from textual.app import ComposeResult

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.panels.linked_charts import GridShape, LinkedCharts, MetricGrid
from ltui.app.panels.panel import LiveText, Panel
from ltui.app.presentation import chart_axis, metric_charts, run_view
from ltui.app.presentation.metric_names import MetricChoice
from ltui.app.presentation.metric_pages import shape_of_small_charts
from ltui.training.state.metric_name_patterns import THROUGHPUT
from ltui.widgets.charts.chart import Chart

CHART_S = 0.9
"""Minimum seconds between two repaints of a chart: a new point seldom changes a cell."""
PREFERENCE = "metrics"
"""Key in ``preferences.json`` of a mapping from preset or script to its chosen metrics."""
SECOND_PREFERENCE = "second_metrics"
"""Such a key for the metrics of the second panel."""
JOINED_PREFERENCE = "joined_metrics"
"""Such a key for whether the first panel has one chart for all of its metrics."""
EVERY_PREFERENCE = "every_metric"
"""Such a key for whether the first panel has a small chart for every metric."""


class RunCharts(LinkedCharts):
    """Panels 1 and 2 of a run screen: metrics and throughput, or other metrics."""

    DEFAULT_CSS = """
    RunCharts { layout: horizontal; }
    """

    def __init__(self, home: Path, requests: LatestCurveRequest, *, id: str) -> None:  # noqa: A002 - Textual's
        super().__init__(home, requests, id=id)
        self._visible: frozenset[str] = frozenset()
        self._small: tuple[tuple[str, ...], GridShape] | None = None
        """The metrics with small charts, if the first panel has these."""
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
        self.read_preferences(frame)
        self._small = self._small_charts(frame) if self.settings.every else None
        self._request(frame)
        if "loss" in visible and self._is_due("loss", frame):
            self._show_metrics(frame)
        if "throughput" in visible:
            if self._is_due("throughput", frame):
                view_model = metric_charts.second_chart(frame, self.settings)
                self.query_one("#throughput-chart", Chart).view_model = view_model
                self._caption("throughput", view_model.title, view_model.subtitle)
            waiting = self.query_one("#waiting", LiveText)
            waiting.display = not self.settings.second
            waiting.show(Text(metric_charts.step_time_text(frame)))

    def _small_charts(self, frame: Frame) -> tuple[tuple[str, ...], GridShape] | None:
        """Return the metrics that fit into the first panel, and the shape of their grid."""
        self._order.update(self.pages, frame.curve_names, frame.snapshot.metrics)
        shape = GridShape(*shape_of_small_charts(*self.query_one(MetricGrid).size))
        names = self._order.names[: shape.places]
        return (names, shape) if names else None

    def _show_metrics(self, frame: Frame) -> None:
        grid = self.query_one(MetricGrid)
        if self._small is None:
            view_models = metric_charts.metric_charts(frame, self.settings)
            grid.show(view_models)
            hidden = grid.hidden_charts
            remedy = f"need{'s' if hidden == 1 else ''} room (z: maximise)"
        else:
            names, shape = self._small
            view_models = metric_charts.charts_of_names(frame, self.settings, names)
            grid.show(view_models, shape, titled=True)
            hidden, remedy = len(self._order.names) - len(names), "(M: all)"
        more = [f"{hidden} more {remedy}"] if hidden > 0 else []
        figures = metric_charts.metrics_subtitle(frame, self.settings)
        title = view_models[0].title if len(view_models) == 1 else "metrics"
        legend = chart_axis.marks_legend(view_models[0].marks)
        self._caption("loss", title, figures, *more, legend=legend)

    def _is_due(self, name: str, frame: Frame) -> bool:
        """Return True if a panel must be drawn: it changed, and was not drawn just before."""
        silence = run_view.silence_text(frame)
        waited = None if frame.curves else int(frame.now)
        figures = (metric_charts.throughput_subtitle(frame), frame.snapshot.metrics)
        options = (self.settings, self._small, self.query_one("#throughput-chart", Chart).view)
        content = (options, frame.curves_version, silence, figures, waited, frame.snapshot.state)
        drawn = self._drawn.get(name)
        if drawn == content:
            return False
        same_options = drawn is not None and drawn[0] == options
        if same_options and 0 <= frame.now - self._drawn_at.get(name, 0.0) < CHART_S:
            return False
        self._drawn[name], self._drawn_at[name] = content, frame.now
        return True

    def _caption(self, name: str, title: str, figures: str, *more: str, legend: str = "") -> None:
        parts = (figures, self.zoom_text(), *more)
        summary = " · ".join(part for part in parts if part)
        self.query_one(f"#{name}", Panel).set_titles(title, summary, legend)

    # -- what the keys change --------------------------------------------------------------------

    def scaled_charts(self) -> list[Chart]:
        second = self.query_one("#throughput-chart", Chart)
        grid = list(self.query_one(MetricGrid).query(Chart))
        return [*grid, second] if self.settings.second else grid

    def redraw(self) -> None:
        if self._frame is not None:
            self.show(self._frame, self._visible)

    # -- metrics ---------------------------------------------------------------------------------

    def choose_metrics(self) -> None:
        """Open the list of metrics for the panel with the focus, and show the chosen ones."""
        # Imported here: the first screen of a run does not need it.
        from ltui.app.screens.choosers import MetricChooser

        frame = self._frame
        if frame is None or not frame.curve_names:
            reading = "The metrics are still being read."
            self.notify(reading if frame is None else "No metric has been logged yet.", timeout=3)
            return
        values = {name: value.last for name, value in frame.snapshot.metrics.items()}
        second = self.query_one("#throughput").has_focus_within
        if second:
            chosen = self.settings.second or (THROUGHPUT,)
            chooser = MetricChooser(frame.curve_names, values, chosen, panel=2)
            self.app.push_screen(chooser, self._use_second)
        else:
            chosen = metric_charts.shown_metrics(frame, self.settings)
            joined = self.settings.joined
            chooser = MetricChooser(frame.curve_names, values, chosen, joined=joined)
            self.app.push_screen(chooser, self._use_first)

    def show_metric(self, name: str) -> None:
        """Show one more metric in the first panel."""
        frame = self._frame
        shown = metric_charts.shown_metrics(frame, self.settings) if frame is not None else ()
        if name not in shown:
            self._use_first(MetricChoice((*shown, name), joined=self.settings.joined))

    def show_second_metric(self, name: str) -> None:
        """Show one more metric in the second panel."""
        shown = self.settings.second or ()
        if name not in shown:
            self._use_second(MetricChoice((*shown, name)))

    def _use_first(self, choice: MetricChoice | None) -> None:
        if choice is None:
            return
        self.settings = replace(self.settings, every=choice.every)
        chosen: dict[str, Any] = {EVERY_PREFERENCE: choice.every}
        if not choice.every:
            names, joined = choice.names, choice.joined and bool(choice.names)
            self.settings = replace(self.settings, metrics=names or None, joined=joined)
            chosen |= {PREFERENCE: names, JOINED_PREFERENCE: joined}
        self.redraw()
        self.remember(chosen)

    def _use_second(self, choice: MetricChoice | None) -> None:
        if choice is None:
            return
        names = () if choice.names == (THROUGHPUT,) else choice.names
        self.settings = replace(self.settings, second=names or None)
        self.redraw()
        self.remember({SECOND_PREFERENCE: names})

    def use_remembered(self, remembered: Mapping[str, Any]) -> None:
        super().use_remembered(remembered)
        self.settings = replace(
            self.settings,
            metrics=_stored_names(remembered.get(PREFERENCE)) or self.settings.metrics,
            second=_stored_names(remembered.get(SECOND_PREFERENCE)) or self.settings.second,
            joined=remembered.get(JOINED_PREFERENCE) is True,
            every=remembered.get(EVERY_PREFERENCE) is True,
        )

    def _request(self, frame: Frame) -> None:
        first, second = self.settings.metrics, self.settings.second or ()
        needs_names = first or second or self._small or self.settings.axis == "samples"
        if not needs_names:
            self.request_curves(frame, None)
            return
        small = self._small[0] if self._small is not None else None
        names = (*(small or metric_charts.shown_metrics(frame, self.settings)), *second)
        self.request_curves(frame, metric_charts.requested_names(names, self.settings))


def _stored_names(names: object) -> tuple[str, ...]:
    return tuple(map(str, names)) if isinstance(names, list) else ()
