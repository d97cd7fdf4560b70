"""The chart widget: curves with zoom, pan, a crosshair and a logarithmic scale.

``plot`` draws the chart. This module connects it to keys, the mouse and Textual's repainting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from msgspec.structs import replace
from textual import events
from textual.binding import BindingType
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive

from ltui.widgets.charts.axis_scale import (
    AxisRange,
    Viewport,
    pan_viewport,
    visible_range,
    zoom_viewport,
)
from ltui.widgets.charts.canvas import Canvas, CanvasWidget, changed_spans
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.plot import Plot, data_range, mark_near, nearest_x, next_point, plot
from ltui.widgets.make_bindings import bindings
from ltui.widgets.view_models import ChartMark, ChartViewModel

if TYPE_CHECKING:
    from textual.screen import Screen

    from ltui.widgets.charts.picture import Picture

ZOOM = 1.5
"""Factor of one zoom step."""
PAN_SHARE = 0.25
"""Fraction of the visible width that one pan step moves."""
_MIN_RANGE_CELLS = 2
"""Minimum cells between both ends of a range that is selected with the mouse."""


class ExportedChart(Protocol):
    """A chart that can be copied and saved."""

    @property
    def screen(self) -> Screen[Any]: ...

    @property
    def export_title(self) -> str:
        """What the chart shows, for its title and for the name of a file."""

    def plain_text(self) -> str:
        """Return the chart as text."""

    def picture(self, title: str) -> Picture:
        """Return the chart as a picture."""


class Chart(CanvasWidget, can_focus=True):
    """A widget that draws a ``ChartViewModel``. New data keeps the zoom and the crosshair."""

    DEFAULT_CSS = """
    Chart { height: 1fr; width: 1fr; min-height: 3; }
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "chart",
        """
        up          | zoom(1)            | zoom in         | Zoom in; also the mouse wheel
        down        | zoom(-1)           | zoom out        | Zoom out
        left        | move(-1)           | crosshair left  | Move the crosshair left; also the mouse
        right       | move(1)            | crosshair right | Move the crosshair right
        shift+left  | pan(-1)            | pan left        | Move the zoomed part left
        shift+right | pan(1)             | pan right       | Move the zoomed part right
        home        | show_all           | show all        | Show the whole x axis again
        end         | follow             | newest          | Go to the newest points and follow them
        comma       | mark(-1)           | previous mark   | Previous mark: checkpoint, stall
        full_stop   | mark(1)            | next mark       | Next mark: checkpoint, stall
        Y           | export('text')     | copy as text    | Copy the chart to the clipboard
        w           | export('svg')      | save as SVG     | Save the chart as SVG
        W           | export('png')      | save as PNG     | Save the chart as PNG
        y           | toggle_log         | log scale       | Linear or logarithmic y axis
        o           | toggle('outliers') | outliers        | Show all values, or cut outliers off
        g           | toggle('grid')     | grid            | Show or hide the grid lines
        escape      | clear              | clear           | Remove the crosshair, then the zoom
        """,
    )

    view_model: reactive[ChartViewModel | None] = reactive(None, repaint=False)
    view: reactive[Viewport | None] = reactive(None, repaint=False)
    """The visible part of the x axis; None for the whole axis."""
    crosshair: reactive[float | None] = reactive(None, repaint=False)
    """Position of the crosshair on the x axis. Set it to link charts."""
    log_y: reactive[bool | None] = reactive(None, repaint=False)
    """Use a logarithmic y axis; None means as the view model says."""
    grid: reactive[bool] = reactive(True, repaint=False)
    outliers: reactive[bool] = reactive(False, repaint=False)
    """Show all values, even if the view model cuts outliers."""

    @dataclass
    class CrosshairMoved(Message):
        """The user moved the crosshair; ``x`` is None if it was removed."""

        chart: Chart
        x: float | None

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Chart.CrosshairMoved) and message.chart is self.chart

    @dataclass
    class ViewChanged(Message):
        """The user zoomed or panned."""

        chart: Chart
        view: Viewport | None

    @dataclass
    class MarkClicked(Message):
        """The user clicked on a mark."""

        chart: Chart
        mark: ChartMark

    @dataclass
    class ExportRequested(Message):
        """The user wants a copy: ``form`` is ``text``, ``svg`` or ``png``."""

        chart: ExportedChart
        form: str

    def __init__(
        self,
        view_model: ChartViewModel | None = None,
        *,
        id: str | None = None,  # noqa: A002 - Textual's name for it
    ) -> None:
        super().__init__(id=id)
        self._plot: Plot | None = None
        self._plot_key: tuple[object, ...] = ()
        self._y_ranges: dict[tuple[bool, bool], AxisRange] = {}
        self._pan_x: int | None = None
        """Column of the mouse while it drags the zoomed part."""
        self._range_from: int | None = None
        """Column where the mouse began to select a range."""
        self._selection: tuple[float, float] | None = None
        self.set_reactive(Chart.view_model, view_model)

    @property
    def is_log(self) -> bool:
        """True if the y axis is logarithmic now."""
        if self.log_y is None:
            return self.view_model is not None and self.view_model.log_y
        return self.log_y

    @property
    def options(self) -> ChartOptions:
        """Everything that decides how the chart is drawn, apart from its data."""
        return ChartOptions(
            view=self.view,
            log_y=self.is_log,
            cursor=self.crosshair,
            grid=self.grid,
            outliers=self.outliers,
            selection=self._selection,
            dashes=self.app.no_color,
        )

    @property
    def export_title(self) -> str:
        return self.view_model.title if self.view_model is not None else ""

    def picture(self, title: str) -> Picture:
        """Return the chart as it is shown as a picture with a title."""
        # Imported here: pictures are needed only when one is saved.
        from ltui.widgets.charts.picture import picture

        assert self.view_model is not None
        return picture(replace(self.view_model, title=title), self.options)

    def plain_text(self) -> str:
        """Return the chart as it is drawn, below its title."""
        lines = [self._current_canvas().line(y).rstrip() for y in range(self.size.height)]
        return "\n".join([self.export_title, *lines])

    def zoomed_range(self) -> AxisRange | None:
        """Return the visible part of the x axis; None while the whole axis is visible."""
        data = data_range(self.view_model)
        return None if self.view is None or data is None else visible_range(self.view, data)

    def _current_canvas(self) -> Canvas:
        return self._current_plot().canvas

    def _current_plot(self) -> Plot:
        """Return the plot of the present data, options and size; it is drawn once for all lines."""
        width, height = self.size
        options = self.options
        key = (self.view_model, options, width, height)
        if self._plot is None or key != self._plot_key:
            before = self._y_ranges.get((options.log_y, options.outliers))
            self._plot = plot(self.view_model, options, width, height, before)
            self._plot_key = key
            if self._plot.y is not None and self._plot.x is not None:
                self._y_ranges[options.log_y, options.outliers] = self._plot.y
        return self._plot

    def validate_view_model(self, new: ChartViewModel | None) -> ChartViewModel | None:
        """Keep a logarithmic axis while the same curves grow, so that it does not come and go."""
        old = self.view_model
        if old is None or new is None or new.log_y or not old.log_y:
            return new
        same = [s.name for s in old.series] == [s.name for s in new.series]
        return replace(new, log_y=True) if same and _all_positive(new) else new

    def watch_view_model(self, old: ChartViewModel | None, new: ChartViewModel | None) -> None:
        if old is not None and new is not None and old.title != new.title:
            self._y_ranges.clear()
        self._redraw()

    def _redraw(self) -> None:
        """Repaint only the cells that changed: over a slow connection each cell costs time."""
        before = self._plot
        if not self.is_mounted or not self.is_on_screen or before is None or not self.size:
            self.refresh()
            return
        old, new = before.canvas, self._current_canvas()
        if (old.width, old.height) != (new.width, new.height):
            self.refresh()
            return
        spans = changed_spans(old, new)
        if sum(last - first for _, first, last in spans) > new.width * new.height // 2:
            self.refresh()
        else:
            for y, first, last in spans:
                self.refresh(Region(first, y, last - first, 1))

    watch_view = watch_crosshair = watch_log_y = watch_outliers = watch_grid = _redraw

    def action_toggle_log(self) -> None:
        self.log_y = not self.is_log

    def action_zoom(self, direction: int) -> None:
        self.zoom(1.0 if self.crosshair is None else self._crosshair_fraction(), direction)

    def action_pan(self, direction: int) -> None:
        self._pan(direction * PAN_SHARE)

    def _pan(self, share: float) -> None:
        """Move the zoomed part by a fraction of its width."""
        data = data_range(self.view_model)
        if data is not None:
            self._set_view(pan_viewport(self.view, data, share))

    def action_show_all(self) -> None:
        self._set_view(None)

    def action_follow(self) -> None:
        """Move to the newest points and keep the zoom."""
        self._set_crosshair(None)
        if self.view is not None:
            self._set_view(replace(self.view, follow=True))

    def action_move(self, direction: int) -> None:
        """Move the crosshair by one cell; it starts at the newest point."""
        plotted = self._current_plot()
        if self.view_model is None or plotted.x is None or plotted.area is None:
            return
        if self.crosshair is None:
            data = data_range(self.view_model)
            self._set_crosshair(None if data is None else min(data.high, plotted.x.high))
            return
        cell = plotted.x.span / plotted.area.width
        series = self.view_model.series
        self._set_crosshair(next_point(series, self.crosshair, direction * cell))

    def move_to_mark(self, direction: int) -> ChartMark | None:
        """Move the crosshair to the next mark in ``direction`` and return it; None at the last one.

        Without a crosshair, start at the visible end. A mark outside the visible part moves it.
        """
        plotted = self._current_plot()
        if self.view_model is None or plotted.x is None:
            return None
        start = plotted.x.low - 1 if direction > 0 else plotted.x.high + 1
        now = start if self.crosshair is None else self.crosshair
        marks = [m for m in self.view_model.marks if (m.at - now) * direction > 0]
        if not marks:
            return None
        mark = min(marks, key=lambda m: (abs(m.at - now), not m.line))
        if self.view is not None and not plotted.x.low <= mark.at <= plotted.x.high:
            half = plotted.x.span / 2
            self._set_view(Viewport(low=mark.at - half, high=mark.at + half))
        self._set_crosshair(mark.at)
        return mark

    def action_mark(self, direction: int) -> None:
        if self.move_to_mark(direction) is None:
            self.app.bell()

    def action_export(self, form: str) -> None:
        if self.view_model is not None and self.view_model.series:
            self.post_message(self.ExportRequested(self, form))

    def action_clear(self) -> None:
        """Remove the crosshair; if there is none, remove the zoom."""
        if self.crosshair is not None:
            self._set_crosshair(None)
        else:
            self._set_view(None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        if takes_key(self.screen, action):
            return False
        if action == "clear":
            # Without anything to clear, the screen handles the key.
            return self.crosshair is not None or self.view is not None
        return True

    def zoom(self, anchor: float, direction: int) -> None:
        """Zoom in (1) or out (-1) around ``anchor``, a fraction of the width."""
        data = data_range(self.view_model)
        if data is not None:
            self._set_view(
                zoom_viewport(self.view, data, anchor, ZOOM if direction > 0 else 1 / ZOOM)
            )

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._on_scroll(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._on_scroll(event, -1)

    def _on_scroll(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        if event.shift:
            self.action_pan(direction)
        else:
            self.zoom(self._current_plot().fraction(event.x), direction)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Begin to select a range with the left button, or to pan with another one."""
        if event.button == 1:
            self._range_from = event.x
        elif self.view is not None:
            self._pan_x = event.x
        else:
            return
        self.capture_mouse()

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._pan_x is None and self._range_from is None:
            return
        self.release_mouse()
        selection, self._selection = self._selection, None
        clicked = self._range_from if selection is None else None
        self._pan_x = self._range_from = None
        marks = () if clicked is None or self.view_model is None else self.view_model.marks
        mark = mark_near(marks, self._current_plot(), clicked or 0, event.y)
        if mark is not None:
            self.post_message(self.MarkClicked(self, mark))
        data = data_range(self.view_model)
        if selection is not None and data is not None:
            low, high = sorted(selection)
            self._set_view(Viewport(low=low, high=high, follow=high >= data.high))
            self._redraw()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        plotted = self._current_plot()
        if plotted.x is None or plotted.area is None or self.view_model is None:
            return
        if self._pan_x is not None:
            if event.x != self._pan_x:
                self._pan((self._pan_x - event.x) / plotted.area.width)
                self._pan_x = event.x
            return
        x = plotted.x.low + plotted.fraction(event.x) * plotted.x.span
        if self._range_from is not None:
            begin = plotted.x.low + plotted.fraction(self._range_from) * plotted.x.span
            # A click with a small movement is no range, nor is a movement beside the curves.
            wide = abs(x - begin) * plotted.area.width >= _MIN_RANGE_CELLS * plotted.x.span > 0
            self._selection = (begin, x) if wide else None
            self._redraw()
            return
        self._set_crosshair(nearest_x(self.view_model.series, x))

    def on_leave(self, event: events.Leave) -> None:
        if event.node is self:
            self._set_crosshair(None)

    def _crosshair_fraction(self) -> float:
        x = self._current_plot().x
        if x is None or self.crosshair is None or x.span <= 0:
            return 1.0
        return min(1.0, max(0.0, (self.crosshair - x.low) / x.span))

    def _set_view(self, view: Viewport | None) -> None:
        if view != self.view:
            self.view = view
            self.post_message(self.ViewChanged(self, view))

    def _set_crosshair(self, x: float | None) -> None:
        if x != self.crosshair:
            self.crosshair = x
            self.post_message(self.CrosshairMoved(self, x))


def takes_key(screen: Screen[Any], action: str) -> bool:
    """Return whether a screen has the key of an action of a widget itself."""
    takes = getattr(screen, "takes_key", None)
    return takes is not None and bool(takes(action))


def _all_positive(view_model: ChartViewModel) -> bool:
    """Return whether a logarithmic axis shows every value."""
    return all(not (s.y <= 0).any() for s in view_model.series)
