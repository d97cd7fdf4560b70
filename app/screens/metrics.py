"""The screen with a chart for every metric of a run, in pages. Only the visible ones are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from msgspec import to_builtins
from msgspec.structs import replace
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.reactive import var
from textual.widgets import Input

from ltui.app.keys.footer import FIELD_HELP_HINT, KeyFooter, KeyHint
from ltui.app.keys.run_keys import CHART_HINTS, CHART_KEYS, SCALE_HINTS
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
from ltui.app.screens.panel_screen import ChartKeysScreen
from ltui.widgets.charts.chart import Chart
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import ChartViewModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ltui.app.screens.run import RunScreen


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


PAGE_HINTS = (
    KeyHint("n N", "page", "screen.page(1)"),
    KeyHint("/", "filter", "screen.filter"),
    KeyHint("< >", "columns", "screen.shape(1, 0)"),
    KeyHint("( )", "rows", "screen.shape(0, 1)"),
    KeyHint("*", "favourite", "screen.favourite"),
    KeyHint("O", "order", "screen.order"),
    KeyHint("z", "one chart", "screen.zoom"),
)
ONE_CHART_HINTS = (
    KeyHint("n N", "metric", "screen.page(1)"),
    KeyHint("z", "all charts", "screen.zoom"),
    KeyHint("*", "favourite", "screen.favourite"),
)
LAST_HINTS = (
    KeyHint("1 2", "show in panel", "screen.put(1)"),
    KeyHint("?", "help", "app.help", keep=True),
    KeyHint("q", "back to the run", "screen.back", keep=True),
)
FILTER_HINTS = (
    KeyHint("⏎", "to the charts", "screen.to_charts", keep=True),
    KeyHint("esc", "clear the filter", "screen.cancel", keep=True),
    FIELD_HELP_HINT,
)


class MetricsScreen(ChartKeysScreen):
    """Charts in pages, which follow the newest frame of the run screen below."""

    ABOUT = "Only the visible charts are read and drawn. The choice is remembered for each script."
    AUTO_FOCUS = "Chart"
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "all_metrics",
        f"""
        [Charts]
        {CHART_KEYS.strip()}
        [Pages]
        n,pagedown | page(1)    | next page      | Next page; with one chart, the next metric
        N,pageup   | page(-1)   | previous page  | Previous page
        greater_than_sign | shape(1, 0)  | more columns  | More columns of charts
        less_than_sign    | shape(-1, 0) | fewer columns | Fewer columns of charts
        right_parenthesis | shape(0, 1)  | more rows     | More rows of charts
        left_parenthesis  | shape(0, -1) | fewer rows    | Fewer rows of charts
        /          | filter     | filter         | Filter: part of a name, val/* or /loss$/
        O          | order      | order          | Order by name, or recently changed first
        *          | favourite  | favourite      | Show this metric first, or no longer
        z          | zoom       | one chart      | Show one chart alone, or the page again
        1          | put(1)     | to panel 1     | Show this metric in panel 1 of the run
        2          | put(2)     | to panel 2     | Show this metric in panel 2 of the run
        [Screen]
        0          | reset      | reset          | Restore the number of charts, zoom and smoothing
        escape     | cancel     | cancel         | Leave one chart, clear the filter, or go back
        q          | back       | back           | Go back to the run
        """,
    )

    def __init__(self, run: RunScreen, requests: LatestCurveRequest) -> None:
        super().__init__()
        self._run, self._requests = run, requests

    def compose(self) -> ComposeResult:
        yield Input(placeholder="filter: part of a name, val/* or /loss$/", compact=True, id="name")
        yield MetricBoard(self._run.run_dir.home, self._requests, id="board")
        yield KeyFooter(id="keys")

    @property
    def charts(self) -> MetricBoard:
        return self.query_one(MetricBoard)

    @property
    def chart_source(self) -> str:
        """The name of the run, for the title of a saved chart."""
        return self._run.chart_source

    def on_mount(self) -> None:
        self.query_one("#name").display = False
        self.query_one("#board").border_title = "metrics"
        self.charts.adopt(self._run.charts)
        self.watch(self._run, "frame", self._draw, init=False)
        self.watch(self.charts, "zoomed", self._show_keys, init=False)
        self.call_after_refresh(lambda: self._draw(self._run.frame))

    def on_screen_resume(self) -> None:
        self._draw(self._run.frame)

    def _draw(self, frame: Frame | None) -> None:
        if frame is not None and self.is_due(frame):
            self.charts.show(frame)

    # -- pages -------------------------------------------------------------------------------------

    def action_page(self, by: int) -> None:
        self.charts.turn(by)

    def action_shape(self, columns: int, rows: int) -> None:
        self.charts.change_shape(columns, rows)

    def action_order(self) -> None:
        board = self.charts
        board.use(board.pages.next_order())
        self.notify(f"Metrics {ORDERS[board.pages.order]}", timeout=2)

    def action_favourite(self) -> None:
        board = self.charts
        name = board.focused_name()
        if name is not None:
            board.use(board.pages.toggle_favourite(name))
            chosen = name in board.pages.favourites
            text = "comes first" if chosen else "is no favourite any more"
            self.notify(f"{clean_name(name)} {text}", timeout=2, markup=False)

    def action_zoom(self) -> None:
        self.charts.toggle_zoom()

    def action_reset(self) -> None:
        self.charts.reset()

    def action_put(self, panel: int) -> None:
        """Show the metric with the focus on the run screen, too."""
        name = self.charts.focused_name()
        if name is None:
            return
        charts = self._run.charts
        if panel == 1:
            charts.show_metric(name)
        else:
            charts.show_second_metric(name)
        self.notify(f"{clean_name(name)} is in panel {panel} of the run", timeout=3, markup=False)

    # -- filter ------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        field = self.query_one("#name", Input)
        field.display = True
        field.value = self.charts.pages.filter
        field.focus()

    @on(Input.Changed)
    def _filter_changed(self, event: Input.Changed) -> None:
        event.stop()
        board = self.charts
        if self.query_one("#name").display and event.value != board.pages.filter:
            board.use(replace(board.pages, filter=event.value))

    @on(Input.Submitted)
    def action_to_charts(self) -> None:
        """Close the field of the filter, and move the focus to the first chart."""
        self.query_one("#name").display = False
        charts = self.charts.grid.charts
        if charts:
            charts[0].focus()

    # -- leaving -----------------------------------------------------------------------------------

    def action_cancel(self) -> None:
        """Undo one thing after the other: one chart, the filter, the screen."""
        board = self.charts
        if board.zoomed:
            board.toggle_zoom()
        elif board.pages.filter or self.query_one("#name").display:
            board.use(replace(board.pages, filter=""))
            self.action_to_charts()
        else:
            self.action_back()

    def action_back(self) -> None:
        self._run.charts.adopt(self.charts)
        self.dismiss()

    def farewell(self) -> str:
        """Return the message to print when the dashboard is closed."""
        return self._run.farewell()

    # -- footer and palette ------------------------------------------------------------------------

    @on(events.DescendantFocus)
    def _show_keys(self) -> None:
        hints: list[KeyHint] = [*(ONE_CHART_HINTS if self.charts.zoomed else PAGE_HINTS)]
        if isinstance(self.focused, Input):
            hints = list(FILTER_HINTS)
        elif isinstance(self.focused, Chart):
            hints += [*CHART_HINTS, *SCALE_HINTS, *LAST_HINTS]
        else:
            hints += [*SCALE_HINTS, *LAST_HINTS]
        self.query_one(KeyFooter).show(hints)

    def palette_entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield title, help and function of each entry that the palette offers here."""
        frame = self._run.frame
        for name in frame.curve_names if frame is not None else ():
            jump = partial(self.charts.go_to, name)
            yield f"Go to metric {clean_name(name)}", "Show the page of this metric", jump
