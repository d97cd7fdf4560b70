"""The panels of a run screen that are visible, by terminal size and by choice. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLines:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelLayout:
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
