"""Draw the picture of a chart as PNG with Pillow, which is an optional dependency."""

from __future__ import annotations

import io
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

from ltui.widgets.charts.picture import HEIGHT, WIDTH, Area, Label, Picture

SCALE = 2
"""Pixels of the file for each pixel of the picture, for sharp screens."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_DASH = 4.0


def png(drawn: Picture) -> bytes:
    """Return the picture as a PNG file."""
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
