"""The chart widget: curves with zoom, pan, a crosshair and a logarithmic scale."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from ltui.widgets.charts.axis_scale import AxisRange
from ltui.widgets.charts.canvas import changed_spans
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.plot import Plot, data_range, nearest_x, next_x, plot
from ltui.widgets.charts.viewport import Viewport, pan_viewport, visible_range, zoom_viewport
from ltui.widgets.palette import LineStyles, line_styles
from ltui.widgets.view_models import ChartViewModel, Tone

ZOOM = 1.5
PAN_SHARE = 0.25


def _key(key: str, action: str, words: str, tooltip: str) -> Binding:
    name = words.replace(" ", "_")
    return Binding(key, action, words, show=False, id=f"chart.{name}", tooltip=tooltip)


class Chart(Widget, can_focus=True):
    """Draws a ``ChartViewModel``. The part in view and the crosshair survive a new view_model."""

    DEFAULT_CSS = """
    Chart { height: 1fr; width: 1fr; min-height: 3; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        _key("up", "zoom(1)", "zoom in", "Zoom in; also the mouse wheel"),
        _key("down", "zoom(-1)", "zoom out", "Zoom out"),
        _key("left", "move(-1)", "crosshair left", "Move the crosshair left; also the mouse"),
        _key("right", "move(1)", "crosshair right", "Move the crosshair right"),
        _key("shift+left", "pan(-1)", "pan left", "Move the zoomed part left; also drag"),
        _key("shift+right", "pan(1)", "pan right", "Move the zoomed part right"),
        _key("home", "show_all", "show all", "Show the whole x axis again"),
        _key("end", "follow", "newest", "Move to the newest points and follow them"),
        _key("y", "toggle_log", "log scale", "Linear or logarithmic y axis"),
        _key("o", "toggle_outliers", "outliers", "Show all values, or cut outliers off"),
        _key("g", "toggle_grid", "grid", "Show or hide the grid lines"),
        _key("escape", "clear", "clear", "Remove the crosshair, then the zoom"),
    ]

    view_model: reactive[ChartViewModel | None] = reactive(None, repaint=False)
    view: reactive[Viewport | None] = reactive(None, repaint=False)
    """The part of the x axis in view; None for all of it."""
    crosshair: reactive[float | None] = reactive(None, repaint=False)
    """Where on the x axis the crosshair stands. Set it to link charts."""
    log_y: reactive[bool | None] = reactive(None, repaint=False)
    """None: as the view_model says."""
    grid: reactive[bool] = reactive(True, repaint=False)
    outliers: reactive[bool] = reactive(False, repaint=False)
    """Show all values, also where the view_model says that outliers are cut."""

    class CrosshairMoved(Message):
        """The person moved the crosshair; ``x`` is None where it left the chart."""

        def __init__(self, chart: Chart, x: float | None) -> None:
            super().__init__()
            self.chart = chart
            self.x = x

        @property
        def control(self) -> Chart:
            return self.chart

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Chart.CrosshairMoved) and message.chart is self.chart

    class ViewChanged(Message):
        """The person zoomed or panned."""

        def __init__(self, chart: Chart, view: Viewport | None) -> None:
            super().__init__()
            self.chart = chart
            self.view = view

        @property
        def control(self) -> Chart:
            return self.chart

    def __init__(
        self,
        view_model: ChartViewModel | None = None,
        *,
        id: str | None = None,  # noqa: A002 - Textual's name for it
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._plot: Plot | None = None
        self._key: tuple[object, ...] = ()
        self._y: dict[tuple[bool, bool], AxisRange] = {}
        self._drag_x: int | None = None
        self._inks: list[Style] = []
        self.set_reactive(Chart.view_model, view_model)

    @property
    def is_log(self) -> bool:
        """Whether the y axis is logarithmic now."""
        if self.log_y is None:
            return self.view_model is not None and self.view_model.log_y
        return self.log_y

    def zoomed_range(self) -> AxisRange | None:
        """The part of the x axis in view; None while all of it is."""
        data = self._data()
        return None if self.view is None or data is None else visible_range(self.view, data)

    def render_lines(self, crop: Region) -> list[Strip]:
        # Styles are looked up once a repaint: for every line they would cost as much as the curves.
        self._inks = self._mix_inks()
        return super().render_lines(crop)

    def _mix_inks(self) -> list[Style]:
        base = self.rich_style
        return [base + style for style in _styles(line_styles(self.app))]

    def render_line(self, y: int) -> Strip:
        picture = self._picture()
        if y >= picture.canvas.height:
            return Strip.blank(self.size.width, self.rich_style)
        return picture.canvas.strip(y, self._inks or self._mix_inks())

    def _picture(self) -> Plot:
        """Return the plot of the present data, options and size; it is drawn once for all lines."""
        width, height = self.size
        options = ChartOptions(
            view=self.view,
            log_y=self.is_log,
            cursor=self.crosshair,
            grid=self.grid,
            outliers=self.outliers,
            dashes=self.app.no_color,
        )
        key = (self.view_model, options, width, height)
        if self._plot is None or key != self._key:
            before = self._y.get((options.log_y, options.outliers))
            self._plot = plot(self.view_model, options, width, height, before)
            self._key = key
            if self._plot.y is not None and self._plot.x is not None:
                self._y[options.log_y, options.outliers] = self._plot.y
        return self._plot

    def watch_view_model(self, old: ChartViewModel | None, new: ChartViewModel | None) -> None:
        if old is not None and new is not None and old.title != new.title:
            self._y.clear()
        self._redraw()

    def watch_view(self) -> None:
        self._redraw()

    def watch_crosshair(self) -> None:
        self._redraw()

    def watch_log_y(self) -> None:
        self._redraw()

    def watch_outliers(self) -> None:
        self._redraw()

    def watch_grid(self) -> None:
        self._redraw()

    def _redraw(self) -> None:
        """Repaint what differs from the picture before: over a slow line, cells cost time."""
        before = self._plot
        if not self.is_mounted or not self.is_on_screen or before is None or not self.size:
            self.refresh()
            return
        now = self._picture()
        old, new = before.canvas, now.canvas
        if (old.width, old.height) != (new.width, new.height):
            self.refresh()
            return
        spans = changed_spans(old, new)
        if sum(last - first for _, first, last in spans) > new.width * new.height // 2:
            self.refresh()
        else:
            for y, first, last in spans:
                self.refresh(Region(first, y, last - first, 1))

    def action_toggle_log(self) -> None:
        self.log_y = not self.is_log

    def action_toggle_outliers(self) -> None:
        self.outliers = not self.outliers

    def action_toggle_grid(self) -> None:
        self.grid = not self.grid

    def action_zoom(self, direction: int) -> None:
        self.zoom(1.0 if self.crosshair is None else self._anchor(), direction)

    def action_pan(self, direction: int) -> None:
        data = self._data()
        if data is not None:
            self._look_at(pan_viewport(self.view, data, direction * PAN_SHARE))

    def action_show_all(self) -> None:
        self._look_at(None)

    def action_follow(self) -> None:
        """Back to the newest points, with the window as wide as it is."""
        self._point_at(None)
        if self.view is not None:
            self._look_at(replace(self.view, follow=True))

    def action_move(self, direction: int) -> None:
        """Move the crosshair by one cell; it begins at the newest point."""
        picture = self._picture()
        if self.view_model is None or picture.x is None or picture.area is None:
            return
        if self.crosshair is None:
            data = self._data()
            self._point_at(None if data is None else min(data.high, picture.x.high))
            return
        cell = picture.x.span / picture.area.width
        self._point_at(self._beyond(self.crosshair, direction, cell))

    def _beyond(self, now: float, direction: int, cell: float) -> float:
        """The data point a cell further on, or the next one where points lie further apart."""
        assert self.view_model is not None
        found = nearest_x(self.view_model.series, now + direction * cell)
        if found is not None and (found - now) * direction > 0:
            return found
        further = next_x(self.view_model.series, now, direction)
        return now if further is None else further

    def action_clear(self) -> None:
        """First the crosshair goes, then the zoom."""
        if self.crosshair is not None:
            self._point_at(None)
        else:
            self._look_at(None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        if action == "clear":
            # With nothing to clear, the key means what it means to the screen.
            return self.crosshair is not None or self.view is not None
        return True

    def zoom(self, anchor: float, direction: int) -> None:
        """Zoom in (1) or out (-1) around a share of the width."""
        data = self._data()
        if data is not None:
            self._look_at(
                zoom_viewport(self.view, data, anchor, ZOOM if direction > 0 else 1 / ZOOM)
            )

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, -1)

    def _wheel(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        if event.shift:
            self.action_pan(direction)
        else:
            self.zoom(self._share(event.x), direction)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.button == 1 and self.view is not None:
            self._drag_x = event.x
            self.capture_mouse()

    def on_mouse_up(self) -> None:
        if self._drag_x is not None:
            self._drag_x = None
            self.release_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        picture = self._picture()
        if picture.x is None or picture.area is None or self.view_model is None:
            return
        if self._drag_x is not None:
            data = self._data()
            moved = (self._drag_x - event.x) / picture.area.width
            if data is not None and moved:
                self._look_at(pan_viewport(self.view, data, moved))
                self._drag_x = event.x
            return
        place = picture.x.low + self._share(event.x) * picture.x.span
        self._point_at(nearest_x(self.view_model.series, place))

    def on_leave(self, event: events.Leave) -> None:
        if event.node is self:
            self._point_at(None)

    def _share(self, x: int) -> float:
        area = self._picture().area
        if area is None:
            return 1.0
        return min(1.0, max(0.0, (x - area.left + 0.5) / area.width))

    def _anchor(self) -> float:
        x = self._picture().x
        if x is None or self.crosshair is None or x.span <= 0:
            return 1.0
        return min(1.0, max(0.0, (self.crosshair - x.low) / x.span))

    def _data(self) -> AxisRange | None:
        return data_range(self.view_model)

    def _look_at(self, view: Viewport | None) -> None:
        if view != self.view:
            self.view = view
            self.post_message(self.ViewChanged(self, view))

    def _point_at(self, x: float | None) -> None:
        if x != self.crosshair:
            self.crosshair = x
            self.post_message(self.CrosshairMoved(self, x))


def _styles(paint: LineStyles) -> list[Style]:
    """Styles in the order of the canvas's inks."""
    tones = (Tone.PLAIN, Tone.DIM)
    own = [*(paint.of(t) for t in tones), paint.faint, paint.of(Tone.DIM)]
    return [*own, *paint.series, *paint.faint_series]
