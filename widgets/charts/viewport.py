"""Which part of a chart's x axis is in view: zoom, pan, and following the growing end.

Pure. ``None`` stands for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltui.widgets.charts.axis_scale import AxisRange, growing_end, nice_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewport:
    low: float
    high: float
    follow: bool = False
    """The window keeps its width and moves with the end of the data."""


def visible_range(view: Viewport | None, data: AxisRange) -> AxisRange:
    """The range to draw, for data that reaches from ``data.low`` to ``data.high``."""
    if view is None:
        if data.span <= 0:
            return AxisRange(data.low - 0.5, data.high + 0.5)
        step = nice_step(data.span, 12)
        # Steps begin at 0 or 1: a start near nothing is the axis's own.
        low = 0.0 if 0 <= data.low <= step else data.low
        return AxisRange(low, growing_end(low, data.high))
    if not view.follow:
        return AxisRange(view.low, view.high)
    width = view.high - view.low
    end = growing_end(data.high - width, data.high)
    return AxisRange(end - width, end)


def zoom_viewport(
    view: Viewport | None, data: AxisRange, anchor: float, factor: float
) -> Viewport | None:
    """Magnify by ``factor`` around ``anchor`` (0 at the left edge to 1 at the right).

    A window that reaches the end of the data follows it; one as wide as the data is all of it.
    """
    now = visible_range(view, data)
    width = now.span / factor
    # No narrower than a billionth of the data, where floats would run out.
    if width >= visible_range(None, data).span or width < data.span * 1e-9:
        return None if factor < 1 else view
    at_end = now.high >= data.high
    if at_end and (anchor > 0.9 or data.high <= now.low + anchor * now.span):
        return Viewport(low=data.high - width, high=data.high, follow=True)
    place = now.low + anchor * now.span
    low = max(place - anchor * width, visible_range(None, data).low)
    return Viewport(low=low, high=low + width, follow=low + width >= data.high)


def pan_viewport(view: Viewport | None, data: AxisRange, share: float) -> Viewport | None:
    """Move by a share of the window's width; stops at the ends, and follows at the right one."""
    if view is None:
        return None
    now, whole = visible_range(view, data), visible_range(None, data)
    low = max(whole.low, now.low + share * now.span)
    if low + now.span >= data.high:
        return Viewport(low=data.high - now.span, high=data.high, follow=True)
    return Viewport(low=low, high=low + now.span)
