"""Borders between the panels of a run screen that the user moves, with keys or the mouse."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace
from textual import events
from textual.containers import Vertical
from textual.geometry import Region
from textual.widget import Widget

from ltui.app.panels.panel import SettingChosen
from ltui.app.settings import settings_of
from ltui.app.user_config import SETTINGS

DETAILS = "details"
PANELS = ("loss", "throughput", "gpus", "ranks", "log", DETAILS)
"""All panels in the order of their numbers, from 1."""
UPPER = frozenset({"loss", "throughput"})
"""The panels with charts."""
STACKED = ("gpus", "ranks", "log")
"""The panels below the charts if all are visible."""

MIN_SIDE_WIDTH = 150
"""Columns from which the details are at the side of the other panels, not below the charts."""
GRID_HEIGHT = 48
"""Fewest lines of a terminal that shows all panels of a run with hundreds of ranks."""
CHART_LINES = 10
"""Fewest lines of a chart panel, including its frame."""
LOG_LINES = 6
"""Fewest lines of the log panel, including its frame."""
FRAME_LINES = 2
"""Lines of a panel's frame."""
OTHER_LINES = 6
"""Lines of the header, the footer, and the notes below the header."""


class LayoutMode(str, Enum):
    """The number of panels that fit into a terminal."""

    TINY = "tiny"
    """A sentence that asks for a larger terminal."""
    TABS = "tabs"
    """One panel at a time."""
    HALF = "half"
    """Both charts, and one panel below them."""
    FULL = "full"
    """Every panel."""
    VAST = "vast"
    """Every panel, with the details at their side."""


class TableLines(Struct, frozen=True, kw_only=True):
    """Number of lines that the tables need for all their rows, without a frame."""

    gpus: int = 0
    """With 0 there is no GPU, and the GPU panel is shown only on request."""
    ranks: int = 2
    has_grids: bool = False
    """There are grids of hundreds of ranks or GPUs, which need more lines than tables."""


def layout_mode(width: int, height: int, needs: TableLines | None = None) -> LayoutMode:
    """Return the layout mode for a terminal size. All panels are shown if they fit."""
    if width < 60 or height < 12:
        return LayoutMode.TINY
    if width < 96 or height < 26:
        return LayoutMode.TABS
    tall = GRID_HEIGHT if needs is not None and needs.has_grids else 40
    if width >= 190 and height >= tall:
        return LayoutMode.VAST
    if width >= 130 and height >= tall:
        return LayoutMode.FULL
    fits = needs is not None and height >= _full_height(needs)
    return LayoutMode.FULL if fits else LayoutMode.HALF


def _full_height(needs: TableLines) -> int:
    gpus = needs.gpus + FRAME_LINES if needs.gpus else 0
    return OTHER_LINES + CHART_LINES + gpus + needs.ranks + FRAME_LINES + LOG_LINES


class PanelLayout(Struct, frozen=True, kw_only=True):
    """The chosen panels and the terminal size. The key ``0`` restores the defaults."""

    width: int = 160
    height: int = 50
    needs: TableLines = TableLines(gpus=2)
    chosen: str = "loss"
    lower: str = "ranks"
    """The last panel chosen below the charts."""
    zoomed: bool = False
    details: bool | None = None
    """The details are at the side of the other panels. None: if there is room."""
    gpus: bool = False
    """The GPU panel was requested although there is no GPU."""

    @property
    def mode(self) -> LayoutMode:
        """The layout mode of the terminal."""
        return layout_mode(self.width, self.height, self.needs)

    def choose(self, panel: str) -> PanelLayout:
        """Select ``panel``, and show it if it is hidden."""
        chosen = replace(self, chosen=panel, lower=self.lower if panel in UPPER else panel)
        if panel == "gpus":
            return replace(chosen, gpus=True)
        return replace(chosen, details=True) if panel == DETAILS else chosen

    def visible(self) -> frozenset[str]:
        """Return the names of the visible panels."""
        mode = self.mode
        if mode is LayoutMode.TINY:
            return frozenset()
        if self.zoomed or mode is LayoutMode.TABS:
            return frozenset({self.chosen, *self._log_below(self.chosen)})
        if mode is LayoutMode.HALF or (self.lower == DETAILS and not self.has_side_room()):
            return UPPER | {self.lower, *self._log_below(self.lower)}
        hidden = set() if self.needs.gpus or self.gpus else {"gpus"}
        return frozenset(
            {*UPPER, *STACKED} - hidden | ({DETAILS} if self.shows_side_details() else set())
        )

    def tabs(self) -> tuple[str, ...]:
        """Return the panels that can be switched to, if not all are visible."""
        mode = self.mode
        if mode is LayoutMode.TINY:
            return ()
        if mode is LayoutMode.TABS or self.zoomed:
            return PANELS
        return tuple(p for p in PANELS if p not in UPPER) if mode is LayoutMode.HALF else ()

    def shows_side_details(self) -> bool:
        """Return whether the details are at the side of the other panels."""
        if self.zoomed or not self.has_side_room():
            return False
        return self.mode is LayoutMode.VAST if self.details is None else self.details

    def toggle_details(self) -> PanelLayout:
        """Show or hide the details, at the side of the other panels or in place of some."""
        if self.shows_side_details() or (
            DETAILS in self.visible() and self.mode is not LayoutMode.TABS
        ):
            layout = replace(self, details=False)
            layout = replace(layout, chosen="loss") if layout.chosen == DETAILS else layout
            return replace(layout, lower="ranks") if layout.lower == DETAILS else layout
        return self.choose(DETAILS)

    def has_side_room(self) -> bool:
        """Return whether the details fit at the side of the other panels."""
        return self.mode in (LayoutMode.FULL, LayoutMode.VAST) and self.width >= MIN_SIDE_WIDTH

    def flexible(self) -> str | None:
        """Return the panel that shares the height below the header with the charts."""
        visible = self.visible()
        if "log" in visible:
            return "log"
        return self.lower if self.lower in visible and self.lower != DETAILS else None

    def fits_rows(self) -> bool:
        """Return whether tables are only as high as their rows, because other panels are visible
        too."""
        return not self.zoomed and len(self.visible() & frozenset(STACKED)) > 1

    def _log_below(self, panel: str) -> tuple[str, ...]:
        """Return the log panel if it fits into the lines that a short table leaves."""
        if self.zoomed or panel not in ("gpus", "ranks"):
            return ()
        rows = self.needs.ranks if panel == "ranks" else self.needs.gpus
        in_tabs = self.mode is LayoutMode.TABS
        above = 0 if in_tabs else CHART_LINES + FRAME_LINES
        fits = rows and self.height > OTHER_LINES + above + rows + LOG_LINES
        return ("log",) if fits else ()


CHARTS_HEIGHT = "layout.charts_height"
FIRST_CHART_WIDTH = "layout.first_chart_width"
DETAILS_WIDTH = "layout.details_width"
BORDERS = (CHARTS_HEIGHT, FIRST_CHART_WIDTH, DETAILS_WIDTH)
"""The settings that moving a border changes."""
KEY_STEP = 5
"""How far one key press moves a border, in percent or columns."""
LEAST_BODY_WIDTH = 60
"""Columns that the details leave to the other panels."""


class Regions(Struct, frozen=True, kw_only=True):
    """Where panels are on the screen. Those that are not visible are None."""

    first: Region | None = None
    """The first chart panel."""
    second: Region | None = None
    below: Region | None = None
    """The panel below that shares the height with the charts."""
    details: Region | None = None
    """The details at the side."""

    def border_at(self, x: int, y: int) -> str | None:
        """Return the setting of the border at a cell; None if no border can be moved there."""
        details = self.details
        if details is not None and x in (details.x - 1, details.x):
            return DETAILS_WIDTH if details.y <= y < details.bottom else None
        if self.first is None or self.second is None:
            return None
        top, bottom = self.first.y, self.first.bottom
        if x in (self.first.right - 1, self.first.right) and top <= y < bottom - 1:
            return FIRST_CHART_WIDTH
        if self.below is not None and self.first.x <= x < self.second.right:
            rows = (bottom - 1, bottom, self.below.y - 1, self.below.y)
            return CHARTS_HEIGHT if y in rows else None
        return None

    def moved(self, border: str, dx: int, dy: int) -> int | None:
        """Return the value of a setting after its border was moved by some cells."""
        first, second, below = self.first, self.second, self.below
        value = None
        if border == DETAILS_WIDTH and self.details is not None:
            room = self.details.x - (0 if first is None else first.x) - LEAST_BODY_WIDTH
            value = self.details.width + min(-dx, max(0, room))
        elif border == FIRST_CHART_WIDTH and first is not None and second is not None:
            value = round(100 * (first.width + dx) / (first.width + second.width))
        elif border == CHARTS_HEIGHT and first is not None and below is not None:
            value = round(100 * (first.height + dy) / (first.height + below.height))
        return None if value is None else limited(border, value)


def limited(border: str, value: int) -> int:
    """Return the nearest value that the setting allows."""
    low, high = SETTINGS[border].low, SETTINGS[border].high
    assert low is not None
    assert high is not None
    return int(max(low, min(high, value)))


class MovableBorders(Vertical):
    """A container of panels whose sizes the user changes. They are remembered."""

    panel_layout: PanelLayout

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's
        super().__init__(id=id)
        self._sizes: dict[str, int | None] = dict.fromkeys(BORDERS)
        self._dragged: tuple[str, Regions, int, int] | None = None
        """The border that follows the mouse, and where panels and mouse were at first."""

    def read_sizes(self) -> None:
        """Use the sizes of the settings."""
        settings = settings_of(self.app)
        for border in BORDERS:
            value = settings.value(border)
            self._sizes[border] = None if value is None else limited(border, value)

    @property
    def has_sizes(self) -> bool:
        """Return whether some panel has another size than by default."""
        return any(size is not None for size in self._sizes.values())

    def apply_sizes(self) -> None:
        """Give the visible panels their sizes; None restores those of the style sheet."""
        layout = self.panel_layout
        shares = layout.visible() >= UPPER
        height, width = self._sizes[CHARTS_HEIGHT], self._sizes[FIRST_CHART_WIDTH]
        divided = shares and layout.flexible() is not None
        self._style("#charts", "height", f"{height}fr" if height and divided else None)
        self._style("#loss", "width", f"{width}fr" if width and shares else None)
        self._style("#throughput", "width", f"{100 - width}fr" if width and shares else None)
        details = self._sizes[DETAILS_WIDTH] if layout.shows_side_details() else None
        if details is not None:
            details = min(details, max(30, layout.width - LEAST_BODY_WIDTH))
        self._style("#details", "width", details)

    def lower_height(self) -> str | None:
        """Return the height of the panel that shares it with the charts; None is the default."""
        height = self._sizes[CHARTS_HEIGHT]
        shared = self.panel_layout.visible() >= UPPER
        return f"{100 - height}fr" if height is not None and shared else None

    def _style(self, selector: str, name: str, value: str | int | None) -> None:
        setattr(self.query_one(selector).styles, name, value)

    def forget_sizes(self) -> None:
        """Restore the default sizes."""
        for border, size in self._sizes.items():
            if size is not None:
                self._sizes[border] = None
                self.post_message(SettingChosen(border, None))

    # -- moving ------------------------------------------------------------------------------------

    def move_border(self, dx: int, dy: int) -> None:
        """Move a border of the panel with the focus by a key."""
        regions = self._regions()
        border = CHARTS_HEIGHT
        if dx:
            in_details = self.query_one("#details").has_focus_within
            border = DETAILS_WIDTH if in_details else FIRST_CHART_WIDTH
        now = regions.moved(border, 0, 0)
        if now is None:
            self.notify("There is no border to move here.", timeout=3)
            return
        by = dy if border == CHARTS_HEIGHT else -dx if border == DETAILS_WIDTH else dx
        self._resize(border, limited(border, (self._sizes[border] or now) + by * KEY_STEP))
        self.post_message(SettingChosen(border, self._sizes[border]))

    def _resize(self, border: str, value: int) -> None:
        if self._sizes[border] != value:
            self._sizes[border] = value
            self.relayout()

    def relayout(self) -> None:
        """Apply the layout again."""
        raise NotImplementedError

    def on_mouse_down(self, event: events.MouseDown) -> None:
        regions = self._regions()
        border = regions.border_at(event.screen_x, event.screen_y)
        if border is not None and event.button == 1:
            event.stop()
            self._dragged = (border, regions, event.screen_x, event.screen_y)
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragged is not None:
            border, regions, x, y = self._dragged
            value = regions.moved(border, event.screen_x - x, event.screen_y - y)
            if value is not None and (event.screen_x, event.screen_y) != (x, y):
                self._resize(border, value)

    def on_mouse_up(self) -> None:
        if self._dragged is not None:
            border, self._dragged = self._dragged[0], None
            self.release_mouse()
            if self._sizes[border] is not None:
                self.post_message(SettingChosen(border, self._sizes[border]))

    def _regions(self) -> Regions:
        layout = self.panel_layout
        visible = layout.visible()
        below = layout.flexible() if visible >= UPPER else None

        def region(name: str | None, shown: bool = True) -> Region | None:
            return self.query_one(f"#{name}", Widget).region if name and shown else None

        return Regions(
            first=region("loss", visible >= UPPER),
            second=region("throughput", visible >= UPPER),
            below=region(below),
            details=region(DETAILS, layout.shows_side_details()),
        )
