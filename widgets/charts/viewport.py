"""The visible part of a chart's x axis: zoom, pan, and following the newest points.

Pure. A viewport of None means the whole axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltui.widgets.charts.axis_scale import AxisRange, growing_end, nice_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewport:
    """The visible part of the x axis, from ``low`` to ``high``."""

    low: float
    high: float
    follow: bool = False
    """The viewport keeps its width and moves with the end of the data."""


def visible_range(view: Viewport | None, data: AxisRange) -> AxisRange:
    """Return the range to draw, for data from ``data.low`` to ``data.high``."""
    if view is None:
        if data.span <= 0:
            return AxisRange(data.low - 0.5, data.high + 0.5)
        step = nice_step(data.span, 12)
        # Steps start at 0 or 1, so an axis that starts near zero starts at zero.
        low = 0.0 if 0 <= data.low <= step else data.low
        return AxisRange(low, data.high if data.is_final else growing_end(low, data.high))
    if not view.follow:
        return AxisRange(view.low, view.high)
    width = view.high - view.low
    end = growing_end(data.high - width, data.high)
    return AxisRange(end - width, end)


def zoom_viewport(
    view: Viewport | None, data: AxisRange, anchor: float, factor: float
) -> Viewport | None:
    """Zoom by ``factor`` around ``anchor`` (0 is the left edge, 1 the right edge).

    A viewport at the end of the data follows it. Zooming out to all data returns None.
    """
    now = visible_range(view, data)
    width = now.span / factor
    # Not narrower than a billionth of the data, where the precision of floats ends.
    if width >= visible_range(None, data).span or width < data.span * 1e-9:
        return None if factor < 1 else view
    at_end = now.high >= data.high
    if at_end and (anchor > 0.9 or data.high <= now.low + anchor * now.span):
        return Viewport(low=data.high - width, high=data.high, follow=True)
    anchor_x = now.low + anchor * now.span
    low = max(anchor_x - anchor * width, visible_range(None, data).low)
    return Viewport(low=low, high=low + width, follow=low + width >= data.high)


def pan_viewport(view: Viewport | None, data: AxisRange, share: float) -> Viewport | None:
    """Move by a fraction of the viewport's width; at the right end, follow the data."""
    if view is None:
        return None
    now, full = visible_range(view, data), visible_range(None, data)
    low = max(full.low, now.low + share * now.span)
    if low + now.span >= data.high:
        return Viewport(low=data.high - now.span, high=data.high, follow=True)
    return Viewport(low=low, high=low + now.span)
