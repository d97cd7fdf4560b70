"""A chart as a picture of lines, areas and texts in pixels, and the picture as SVG.

Pure. The visible part, the range of the y axis and the reduction to columns are those of ``plot``.
A PNG is drawn from the same picture.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape

from msgspec import Struct, field

from ltui.widgets.charts.annotations import value_text
from ltui.widgets.charts.axis_scale import AxisRange, linear_ticks, visible_range
from ltui.widgets.charts.braille import CurveColumns
from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.charts.chart_options import ChartOptions
from ltui.widgets.charts.parallel_plot import ParallelViewModel
from ltui.widgets.charts.plot import Layout, VisibleCurve, data_range, lay_out, scale_note
from ltui.widgets.formats import THIN
from ltui.widgets.palette import LIGHT_SERIES
from ltui.widgets.view_models import ChartMark, ChartSeries, ChartViewModel

WIDTH, HEIGHT = 960, 540
"""Size of a picture in pixels."""
LEFT, RIGHT, _BOTTOM, TITLE, LINE = 76, 20, 50, 44, 20
"""Pixels of the margins, of the title, and of a line of the legend."""
_LETTER = 7.2
"""Estimated pixels of a letter, to arrange the legend."""
_COLUMNS, _ROWS = 425, 120
"""Size of the canvas in cells by which curves are reduced: two columns a cell."""
DIM, _BAND, _GRID = 0.4, 0.2, "#e4e4e4"
_TEXT, AXIS = "#222222", "#777777"
_MARK_ROWS, _MARK_LETTERS = 4, 34

Point = tuple[float, float]


class Line(Struct, frozen=True):
    points: Sequence[Point]
    colour: str
    width: float = 1.0
    dashed: bool = False


class Area(Struct, frozen=True):
    points: Sequence[Point]
    colour: str


class Label(Struct, frozen=True):
    """A text whose ``anchor`` (start, middle or end) is at ``x``, on the base line ``y``."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: int = 12
    colour: str = _TEXT


class Picture(Struct):
    """Items in the order in which they are drawn, on a white ground."""

    items: list[Line | Area | Label] = field(default_factory=list)


class _Frame(Struct, frozen=True):
    """Position of the axes, and what they show."""

    top: float
    x: AxisRange
    y: AxisRange
    dots: int

    @property
    def bottom(self) -> float:
        return HEIGHT - _BOTTOM

    def across(self, at: float) -> float:
        return LEFT + (at - self.x.low) / (self.x.span or 1.0) * (WIDTH - LEFT - RIGHT)

    def column(self, at: float) -> float:
        return LEFT + (at + 0.5) / self.dots * (WIDTH - LEFT - RIGHT)

    def down(self, value: float) -> float:
        share = (self.y.high - value) / (self.y.span or 1.0)
        return self.top + min(1.0, max(0.0, share)) * (self.bottom - self.top)


def picture(view_model: ChartViewModel, options: ChartOptions) -> Picture:
    """Return the chart with title, legend and axes, as the options show it."""
    drawn = Picture()
    title = plain(view_model.title)
    drawn.items.append(Label(LEFT, 28, title, size=18))
    data = data_range(view_model)
    if data is None:
        text = plain(view_model.note or "no data yet")
        drawn.items.append(Label(WIDTH / 2, HEIGHT / 2, text, "middle", colour=AXIS))
        return drawn
    x = visible_range(options.view, data)
    layout = lay_out(Canvas(_COLUMNS, _ROWS), view_model, options, x, None)
    legend = [
        (plain(f"{one.name} {value_text(one, None, view_model.is_rate)}"), _colour_of(one))
        for one in view_model.series
    ]
    lines = draw_legend(drawn, legend)
    axes = _Frame(TITLE + lines * LINE, x, layout.y, 2 * layout.area.width)
    _draw_axes(drawn, view_model, options, layout, axes)
    curves = sorted(layout.curves, key=lambda curve: not curve.series.dim)
    for curve in curves:
        _draw_band(drawn, curve, axes)
    for curve in curves:
        colour, width = _colour_of(curve.series), 1.8
        for points in _runs(curve.line, axes):
            drawn.items.append(Line(points, colour, 1.0 if curve.series.dim else width))
    _draw_marks(drawn, view_model, axes)
    return drawn


def draw_legend(drawn: Picture, entries: Sequence[tuple[str, str]]) -> int:
    """Draw texts, each with a line of its colour; return the number of lines."""
    x, line = float(LEFT), 1
    for text, colour in entries:
        width = 30 + _LETTER * len(text)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, line = float(LEFT), line + 1
        y = TITLE + (line - 1) * LINE + 4.0
        drawn.items.append(Line([(x, y - 4), (x + 18, y - 4)], colour, 3))
        drawn.items.append(Label(x + 24, y, text))
        x += width + 12
    return line


def _draw_axes(
    drawn: Picture,
    view_model: ChartViewModel,
    options: ChartOptions,
    layout: Layout,
    axes: _Frame,
) -> None:
    right = WIDTH - RIGHT
    for tick in layout.ticks:
        y = axes.down(tick.at)
        drawn.items.append(Line([(LEFT, y), (right, y)], _GRID))
        drawn.items.append(Label(LEFT - 8, y + 4, plain(tick.label), "end", colour=AXIS))
    for tick in linear_ticks(
        axes.x, 8, time=view_model.x_time, whole=view_model.x_whole, clock=view_model.x_clock
    ):
        x = axes.across(tick.at)
        drawn.items.append(Line([(x, axes.bottom), (x, axes.bottom + 5)], AXIS))
        label = Label(x, axes.bottom + 19, plain(tick.label), "middle", colour=AXIS)
        drawn.items.append(label)
    corner = (LEFT, axes.bottom)
    drawn.items.append(Line([(LEFT, axes.top), corner, (right, axes.bottom)], AXIS))
    # The keys that change the scale are of no use beside a picture.
    scale = scale_note(view_model, options, layout)[0].partition(" (")[0]
    drawn.items.append(Label(LEFT, HEIGHT - 12, plain(scale), colour=AXIS))
    drawn.items.append(Label(right, HEIGHT - 12, plain(view_model.x_label), "end"))


def _draw_band(drawn: Picture, curve: VisibleCurve, axes: _Frame) -> None:
    low, high = curve.low, curve.high
    if low is None or high is None:
        return
    colour = mixed_colour(curve.series.colour, _BAND)
    edge: list[tuple[float, float, float]] = []
    rows = zip(low.at.tolist(), low.low.tolist(), high.high.tolist(), strict=True)
    for at, bottom, top in (*rows, (math.nan, math.nan, math.nan)):
        if math.isfinite(bottom) and math.isfinite(top) and 0 <= at < axes.dots:
            edge.append((axes.column(at), axes.down(bottom), axes.down(top)))
        elif edge:
            lower = [(x, y) for x, y, _ in edge]
            drawn.items.append(Area([*lower, *((x, y) for x, _, y in reversed(edge))], colour))
            edge = []


def _draw_marks(drawn: Picture, view_model: ChartViewModel, axes: _Frame) -> None:
    visible = [m for m in view_model.marks if axes.x.low <= m.at <= axes.x.high]
    for mark in visible:
        x = axes.across(mark.at)
        if not mark.line:
            drawn.items.append(_mark_shape(mark.sign, x, axes.bottom - 5))
    _draw_marks_legend(drawn, visible)
    for number, mark in enumerate(m for m in visible if m.line):
        x, y = axes.across(mark.at), axes.top + 12 + 14 * (number % _MARK_ROWS)
        drawn.items.append(Line([(x, axes.top), (x, axes.bottom)], AXIS, dashed=True))
        text = plain(mark.text)
        if len(text) > _MARK_LETTERS:
            text = f"{text[: _MARK_LETTERS - 3]}..."
        anchor, at = ("start", x + 4) if x < WIDTH * 0.7 else ("end", x - 4)
        drawn.items.append(Label(at, y, text, anchor, size=10, colour=AXIS))


def _draw_marks_legend(drawn: Picture, marks: Sequence[ChartMark]) -> None:
    """Explain the signs at the foot of the chart. A mark with a line has its text beside it."""
    kinds = dict.fromkeys((m.sign, m.kind) for m in marks if m.kind and not m.line)
    x = WIDTH / 2
    for sign, kind in kinds:
        drawn.items.append(_mark_shape(sign, x, HEIGHT - 16))
        drawn.items.append(Label(x + 10, HEIGHT - 12, plain(kind), colour=AXIS))
        x += 34 + _LETTER * len(kind)


def _mark_shape(sign: str, x: float, y: float) -> Area | Line:
    """Return a diamond for a checkpoint and a short line for the begin of an epoch."""
    if sign == "◆":
        return Area([(x - 5, y), (x, y - 5), (x + 5, y), (x, y + 5)], AXIS)
    return Line([(x, y - 4), (x, y + 4)], AXIS, 1.5)


def _runs(columns: CurveColumns, axes: _Frame) -> Iterator[list[Point]]:
    """Yield the points of each part of a curve without a gap, with the extremes of each column."""
    points: list[Point] = []
    fields = (columns.at, columns.first, columns.low, columns.high, columns.last)
    for at, *values in zip(*(part.tolist() for part in fields), strict=True):
        if not 0 <= at < axes.dots:
            continue
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            if points:
                yield points
            points = []
            continue
        x = axes.column(at)
        points += [(x, axes.down(value)) for value in dict.fromkeys(finite)]
    if len(points) == 1:
        points = [points[0], (points[0][0] + 1.5, points[0][1])]
    if points:
        yield points


def _colour_of(series: ChartSeries) -> str:
    return mixed_colour(series.colour, DIM if series.dim else 1.0)


def mixed_colour(index: int, strength: float) -> str:
    """Return the colour of a series, mixed with white."""
    colour = LIGHT_SERIES[index % len(LIGHT_SERIES)]
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)


def plain(text: str) -> str:
    """Return a text without the thin spaces that fonts of pictures may lack."""
    return text.replace(THIN, " ")


def svg(drawn: Picture) -> str:
    """Return the picture as an SVG document."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *(_element(item) for item in drawn.items),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _element(item: Line | Area | Label) -> str:
    if isinstance(item, Label):
        place = f'x="{item.x:.1f}" y="{item.y:.1f}" text-anchor="{item.anchor}"'
        style = f'font-size="{item.size}" fill="{item.colour}"'
        return f"<text {place} {style}>{escape(item.text)}</text>"
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in item.points)
    if isinstance(item, Area):
        return f'<polygon points="{points}" fill="{item.colour}"/>'
    dashes = ' stroke-dasharray="4 4"' if item.dashed else ""
    stroke = f'stroke="{item.colour}" stroke-width="{item.width:g}" stroke-linejoin="round"'
    return f'<polyline points="{points}" fill="none" {stroke}{dashes}/>'


SCALE = 2
"""Pixels of the file for each pixel of the picture, for sharp screens."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_DASH = 4.0


def png(drawn: Picture) -> bytes:
    """Return the picture as a PNG file. Raise ``ImportError`` without Pillow."""
    # Imported here: Pillow is optional and slow to load.
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "#ffffff")
    draw = ImageDraw.Draw(image)
    for item in drawn.items:
        if isinstance(item, Label):
            font = ImageFont.load_default(item.size * SCALE)
            place = (item.x * SCALE, item.y * SCALE)
            draw.text(place, item.text, item.colour, font, anchor=_ANCHORS[item.anchor])
            continue
        points = [(x * SCALE, y * SCALE) for x, y in item.points]
        if isinstance(item, Area):
            draw.polygon(points, fill=item.colour)
        elif item.dashed:
            for (x0, y0), (x1, y1) in pairwise(points):
                dashes = int(max(abs(x1 - x0), abs(y1 - y0)) / (_DASH * SCALE)) or 1
                ends = [
                    (x0 + (x1 - x0) * n / dashes, y0 + (y1 - y0) * n / dashes)
                    for n in range(dashes + 1)
                ]
                for begin, end in list(pairwise(ends))[::2]:
                    draw.line([begin, end], item.colour, SCALE)
        else:
            draw.line(points, item.colour, max(1, round(item.width * SCALE)), joint="curve")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


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
