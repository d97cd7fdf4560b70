"""Parallel coordinates as a picture of lines and texts in pixels. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ltui.widgets.charts.parallel_plot import ParallelViewModel
from ltui.widgets.charts.picture import (
    AXIS,
    DIM,
    HEIGHT,
    LEFT,
    LINE,
    RIGHT,
    TITLE,
    WIDTH,
    Label,
    Line,
    Picture,
    draw_legend,
    mixed_colour,
    plain,
)

_FOOT, _NAMES = 24, 30
"""Pixels below the axes, and of the line with their names."""


def parallel_picture(
    view_model: ParallelViewModel, title: str, highlighted: Collection[str] = ()
) -> Picture:
    """Return all axes and lines with a legend; the ``highlighted`` lines are thick and on top."""
    drawn = Picture()
    drawn.items.append(Label(LEFT, 28, plain(title), size=18))
    if not view_model.is_drawable:
        drawn.items.append(Label(WIDTH / 2, HEIGHT / 2, plain(view_model.note), "middle"))
        return drawn
    chosen = {line.key for line in view_model.lines} & {*highlighted}
    strength = {
        line.key: DIM if chosen and line.key not in chosen else 1.0 for line in view_model.lines
    }
    legend = [
        (plain(line.name), mixed_colour(line.colour, strength[line.key]))
        for line in view_model.lines
    ]
    top = TITLE + draw_legend(drawn, legend) * LINE + _NAMES
    bottom = HEIGHT - _FOOT
    last = len(view_model.axes) - 1
    places = [LEFT + number * (WIDTH - LEFT - LEFT - RIGHT) / last for number in range(last + 1)]
    for line in sorted(view_model.lines, key=lambda line: line.key in chosen):
        points = [
            (x, bottom - place * (bottom - top))
            for x, place in zip(places, line.places, strict=True)
        ]
        width = 3.0 if line.key in chosen else 1.8
        drawn.items.append(Line(points, mixed_colour(line.colour, strength[line.key]), width))
    for x, axis in zip(places, view_model.axes, strict=True):
        drawn.items.append(Line([(x, top), (x, bottom)], AXIS))
        drawn.items.append(Label(x, top - 12, plain(axis.title), "middle"))
        for place, text in axis.ticks:
            y = bottom - place * (bottom - top)
            drawn.items.append(Label(x + 6, y + 4, plain(text), size=11))
    return drawn
