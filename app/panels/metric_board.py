"""Every metric of a run as a chart, in pages. Only the visible ones are read and drawn."""

from __future__ import annotations

from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.reactive import var

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.panels.linked_charts import GridShape, LinkedCharts, MetricGrid
from ltui.app.panels.panel import LiveText
from ltui.app.presentation import metric_charts
from ltui.app.presentation.metric_pages import (
    FAVOURITE_SIGN,
    MAX_COLUMNS,
    MAX_ROWS,
    ORDERS,
    PREFERENCE,
    MetricPages,
    shape_for,
)
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import ChartViewModel


class MetricBoard(LinkedCharts):
    """A line about the page, and the charts of the page."""

    DEFAULT_CSS = """
    MetricBoard #page { height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    zoomed: var[str | None] = var(None)
    """The metric whose chart fills the screen."""

    def __init__(self, home: Path, requests: LatestCurveRequest, *, id: str) -> None:  # noqa: A002 - Textual's
        super().__init__(home, requests, id=id)
        self._first = 0
        """Place of the first visible metric."""
        self._drawn: tuple[object, ...] = ()
        self._placed: tuple[str, ...] = ()
        """The metrics of the charts, as they were drawn last."""
        self._scales: dict[str, tuple[bool | None, bool]] = {}
        """Whether the y axis of a metric is logarithmic, and whether it shows outliers."""

    def compose(self) -> ComposeResult:
        yield LiveText(id="page")
        yield MetricGrid(id="all-metrics")

    @property
    def grid(self) -> MetricGrid:
        return self.query_one(MetricGrid)

    def show(self, frame: Frame) -> None:
        """Draw the visible charts, and request their curves for the next frame."""
        self._frame = frame
        self.read_preferences(frame)
        self._order.update(self.pages, frame.curve_names, frame.snapshot.metrics)
        names = self.visible_names()
        self.request_curves(frame, metric_charts.requested_names(names, self.settings))
        self._show_page(names)
        shape = GridShape(1, 1) if self.zoomed else self._shape()
        content = (names, shape, self.settings, self.pages, frame.curves_version, len(frame.marks))
        if content != self._drawn:
            self._drawn = content
            self._keep_scales()
            view_models = metric_charts.charts_of_names(frame, self.settings, names)
            charts = [self._starred(*pair) for pair in zip(names, view_models, strict=True)]
            note = "no metric matches the filter" if self.pages.filter else "no metric was logged"
            charts = charts or [ChartViewModel(title="metrics", note=note)]
            self.grid.show(charts, shape, titled=True)
            self._place_scales(names)

    def _keep_scales(self) -> None:
        """Note the y axis that was chosen for each visible metric."""
        for name, chart in zip(self._placed, self.grid.charts, strict=False):
            self._scales[name] = chart.log_y, chart.outliers

    def _place_scales(self, names: tuple[str, ...]) -> None:
        """Give each chart the y axis of its metric, which another chart may have drawn before."""
        self._placed = names
        for name, chart in zip(names, self.grid.charts, strict=False):
            chart.log_y, chart.outliers = self._scales.get(name, (None, False))

    def _starred(self, name: str, view_model: ChartViewModel) -> ChartViewModel:
        if name not in self.pages.favourites:
            return view_model
        return replace(view_model, title=f"{FAVOURITE_SIGN} {view_model.title}")

    def redraw(self) -> None:
        if self._frame is not None:
            self.show(self._frame)

    def on_resize(self, event: events.Resize) -> None:  # noqa: ARG002
        self.redraw()

    def _shape(self) -> GridShape:
        width, height = self.grid.size
        return GridShape(*shape_for(self.pages, width, height))

    # -- pages -------------------------------------------------------------------------------------

    def visible_names(self) -> tuple[str, ...]:
        """Return the metrics of the page."""
        if self.zoomed in self._order.names:
            return (self.zoomed,) if self.zoomed is not None else ()
        return self._order.names[self._first : self._first + self._shape().places]

    def focused_name(self) -> str | None:
        """Return the metric of the chart with the focus, or else the first visible one."""
        names = self.visible_names()
        for name, chart in zip(names, self.grid.charts, strict=False):
            if chart.has_focus:
                return name
        return names[0] if names else None

    def turn(self, by: int) -> None:
        """Show the next page, or with ``by`` -1 the previous one; zoomed, the next metric."""
        if self.zoomed in self._order.names:
            place = self._order.names.index(self.zoomed) + by
            self.zoomed = self._order.names[place % len(self._order.names)]
        else:
            places = self._shape().places
            last = (max(0, len(self._order.names) - 1)) // places * places
            self._first = min(last, max(0, self._first + by * places))
        self.redraw()

    def go_to(self, name: str) -> None:
        """Show the page of a metric and move the focus to its chart."""
        if name not in self._order.names:
            self.use(replace(self.pages, filter=""))
        if name in self._order.names:
            places = self._shape().places
            place = self._order.names.index(name)
            self._first = place // places * places
            self.zoomed = None
            self.redraw()
            self.grid.charts[place - self._first].focus()

    def toggle_zoom(self) -> None:
        """Show one chart alone, or the page again."""
        self.zoomed = None if self.zoomed else self.focused_name()
        self.redraw()
        if self.grid.charts:
            self.grid.charts[0].focus()

    # -- choices -----------------------------------------------------------------------------------

    def use(self, pages: MetricPages) -> None:
        """Use and remember what the user chose."""
        if pages.filter != self.pages.filter or pages.order != self.pages.order:
            self._first = 0
        self.pages = pages
        self._order.invalidate()
        self.redraw()
        self.remember({PREFERENCE: to_builtins(pages)})

    def change_shape(self, columns: int, rows: int) -> None:
        """Add columns and rows; negative numbers remove some."""
        shape = self._shape()
        self.use(
            replace(
                self.pages,
                columns=min(MAX_COLUMNS, max(1, shape.columns + columns)),
                rows=min(MAX_ROWS, max(1, shape.rows + rows)),
            )
        )

    def reset(self) -> None:
        """Restore the automatic number of charts, the axis, the smoothing and the zoom."""
        self.zoomed = None
        super().reset()
        self._scales.clear()
        self.use(replace(self.pages, columns=None, rows=None))

    # -- the line above the charts -----------------------------------------------------------------

    def _show_page(self, names: tuple[str, ...]) -> None:
        frame = self._frame
        total = len(frame.curve_names) if frame is not None else 0
        shown = f"{len(self._order.names)} of {total}" if self.pages.filter else str(total)
        parts = [f"{shown} metric{'' if total == 1 else 's'}", ORDERS[self.pages.order]]
        if self.zoomed is None and names:
            places = self._shape().places
            pages = -(-len(self._order.names) // places)
            parts.insert(0, f"page {self._first // places + 1}/{pages}")
        if frame is not None:
            parts.insert(0, clean_name(frame.snapshot.name))
        if self.pages.filter:
            parts.append(f"filter {clean_name(self.pages.filter)}")
        parts.append(f"smoothing {self.settings.smoothing:g}" if self.settings.smoothing else "raw")
        parts.append(self.zoom_text())
        line = Text(" · ".join(part for part in parts if part), no_wrap=True)
        if self._order.problem:
            line = Text(self._order.problem, "bold", no_wrap=True)
        self.query_one("#page", LiveText).show(line)
