"""The options of a chart that the user changes with keys, and the inks of its canvas. Pure."""

from __future__ import annotations

import math

from msgspec import Struct

from ltui.widgets.charts.axis_scale import Viewport
from ltui.widgets.view_models import ChartSeries

MARKERS = "●■▲▼○□△▽▶◀▷◁"
"""Signs at a curve's end and in the legend, which identify curves without colour. The diamond is
that of a checkpoint."""
COLOURS = 8
"""Number of series colours of each palette."""
LINES = 4
"""Number of line styles: whole, and with gaps after one, two or three pairs of columns."""
INK_TEXT, INK_DIM, INK_FAINT, INK_CURSOR, INK_SERIES = 0, 1, 2, 3, 4
"""Style indices of the canvas, in the order of ``CanvasWidget._ink_styles``.

INK_SERIES is the first series colour; faint variants follow.
"""


class ChartOptions(Struct, frozen=True, kw_only=True):
    """Everything that decides how a chart is drawn, apart from its data."""

    view: Viewport | None = None
    log_y: bool = False
    cursor: float | None = None
    """Position of the crosshair on the x axis; None if there is no crosshair."""
    grid: bool = True
    outliers: bool = False
    """Show all values, even if the view model cuts outliers."""
    selection: tuple[float, float] | None = None
    """Both ends of the range that the user selects with the mouse."""
    dashes: bool = False
    """Draw curves with different dashes, because there is no colour."""


def ink_of(series: ChartSeries, *, faint: bool = False) -> int:
    """Return the ink of a series, normal or faint."""
    return INK_SERIES + series.colour % COLOURS + (COLOURS if faint else 0)


def marker_of(series: ChartSeries) -> str:
    """Return the sign of a series for the legend and its end."""
    return "·" if series.dim else sign_of(series.colour)


def dash_of(colour: int, *, dashes: bool) -> int:
    """Return the dash of a curve (``braille.line``).

    Every 96 indices, colours and signs repeat, and the line is another one. With ``dashes`` the
    lines of different colours differ, too.
    """
    return (colour // (COLOURS * len(MARKERS)) + (colour if dashes else 0)) % LINES


def sign_of(colour: int) -> str:
    """Return the sign of a colour's index; series whose colours repeat have other signs."""
    turn = colour % (COLOURS * len(MARKERS)) // math.lcm(COLOURS, len(MARKERS))
    return MARKERS[(colour + turn) % len(MARKERS)]
