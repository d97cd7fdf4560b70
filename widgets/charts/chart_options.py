"""What a person chose of a chart's options, and the inks of its canvas. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ltui.widgets.charts.viewport import Viewport
from ltui.widgets.palette import MARKERS
from ltui.widgets.view_models import ChartSeries

INK_TEXT, INK_DIM, INK_FAINT, INK_CURSOR, INK_SERIES = 0, 1, 2, 3, 4
"""Inks of the canvas. From INK_SERIES on: the curves' colours, then the same ones faint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartOptions:
    """What the person at the keyboard chose, apart from the data."""

    view: Viewport | None = None
    log_y: bool = False
    cursor: float | None = None
    """Where on the x axis the crosshair stands."""
    grid: bool = True
    outliers: bool = False
    """Show all values, also where the view_model says that outliers are cut."""
    dashes: bool = False
    """Tell curves apart by their dashes, where there is no colour."""
    colours: int = 8


def ink_of(series: ChartSeries, options: ChartOptions, faint: bool) -> int:
    return INK_SERIES + series.colour % options.colours + (options.colours if faint else 0)


def marker_of(series: ChartSeries) -> str:
    return "·" if series.dim else MARKERS[series.colour % len(MARKERS)]
