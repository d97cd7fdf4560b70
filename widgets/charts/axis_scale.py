"""Axis ranges that change in steps, ticks at round numbers, and tick labels.

Pure. A range is kept while the data fills enough of it, so that an axis does not move with every
new point.

The visible part of a chart's x axis: zoom, pan, and following the newest points. A viewport of None
means the whole axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from ltui.widgets.formats import THIN, duration

_MIN_FILLED_SHARE = 0.45
"""Minimum fraction of the previous range that the data must fill for the range to be kept."""
_MIN_FILLED_LOG_SHARE = 0.8
"""The same for a logarithmic axis, on which a curve that falls makes room slowly."""
NOISE = 1e-6
"""Relative difference below which values are drawn as equal.

Ranks compute in float32, and its rounding alone causes a tenth of this.
"""


class AxisRange(Struct, frozen=True):
    """The interval that an axis shows."""

    low: float
    high: float
    is_final: bool = False
    """The data on this axis grow no more, so it needs no room for them."""
    is_cut: bool = False
    """Outliers lie outside of this range."""

    @property
    def span(self) -> float:
        return self.high - self.low


class AxisTick(Struct, frozen=True):
    """A labelled position on an axis."""

    at: float
    label: str


def nice_step(span: float, parts: int) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that gives at most ``parts`` steps."""
    if not (span > 0 and math.isfinite(span)):
        return 1.0
    min_step = span / max(1, parts)
    power = 10.0 ** math.floor(math.log10(min_step))
    if power == 0:
        return span
    steps = (factor * power for factor in (1.0, 2.0, 5.0))
    return next((step for step in steps if step >= min_step * (1 - 1e-9)), 10 * power)


def sticky_range(low: float, high: float, previous: AxisRange | None) -> AxisRange:
    """Return a round range around ``low`` to ``high``; the previous one if it still fits."""
    if high - low <= NOISE * max(abs(low), abs(high)):
        room = abs(high) * 0.05 or 0.5
        low, high = low - room, high + room
    fits = previous is not None and previous.low <= low and high <= previous.high
    if previous is not None and fits and high - low >= _MIN_FILLED_SHARE * previous.span:
        return previous
    step = nice_step(high - low, 10)
    bottom, top = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return AxisRange(bottom, top) if top > bottom else AxisRange(low, high)


def sticky_log_range(low: float, high: float, previous: AxisRange | None) -> AxisRange:
    """Return a range of exponents of ten around ``low`` to ``high`` that ends at 1, 2 or 5.

    The previous range is kept if it still fits. An axis of less than one decade is a linear range.
    """
    if high - low < 1:
        return sticky_range(low, high, previous)
    fits = previous is not None and previous.low <= low and high <= previous.high
    if previous is not None and fits and high - low >= _MIN_FILLED_LOG_SHARE * previous.span:
        return previous
    return AxisRange(_round_exponent(low, down=True), _round_exponent(high, down=False))


def _round_exponent(exponent: float, *, down: bool) -> float:
    """Return the exponent of the next value of the form 1, 2 or 5 times a power of ten."""
    decade = math.floor(exponent + 1e-9)
    ends = [decade + math.log10(factor) for factor in (1, 2, 5, 10)]
    if down:
        return max(end for end in ends if end <= exponent + 1e-9)
    return min(end for end in ends if end >= exponent - 1e-9)


def growing_end(low: float, high: float) -> float:
    """Return ``high`` rounded up, so that a growing curve seldom changes its axis."""
    step = nice_step(high - low, 20)
    return max(high, math.ceil(high / step - 1e-9) * step)


def linear_ticks(
    within: AxisRange, most: int, *, time: bool = False, whole: bool = False, clock: bool = False
) -> list[AxisTick]:
    """Return at most ``most`` ticks at round numbers inside the range.

    With ``time`` the numbers are seconds, with ``clock`` unix seconds. With ``whole`` the ticks are
    at whole numbers, as for steps.
    """
    if clock:
        return _clock_ticks(within, most)
    step = _time_step(within.span, most) if time else nice_step(within.span, most)
    if whole:
        step = max(1.0, step)
    positions = _multiples(within, step, most)
    if len(positions) < 2 and not time and not whole:
        # A single tick shows no scale.
        step = nice_step(0.4 * step, 1)
        positions = _multiples(within, step, most)
        positions = positions[:: 1 if len(positions) <= most + 1 else 2]
    largest = max((abs(p) for p in positions), default=0.0)
    return [AxisTick(p, time_label(p) if time else tick_label(p, step, largest)) for p in positions]


def _multiples(within: AxisRange, step: float, most: int) -> list[float]:
    """Return the multiples of ``step`` in a range that has about ``most`` of them."""
    first = math.ceil(within.low / step - 1e-9)
    last = math.floor(within.high / step + 1e-9)
    return [n * step for n in range(first, min(last, first + 4 * most) + 1)]


def time_label(seconds: float) -> str:
    """Format a duration without parts that are zero: ``30 m``, ``1 h 30 m``."""
    text = duration(seconds)
    for zero_part in (" 00 s", " 00 m", " 00 h"):
        text = text.removesuffix(zero_part)
    return text.removesuffix(".0 s") + " s" if text.endswith(".0 s") else text


def _clock_ticks(within: AxisRange, most: int) -> list[AxisTick]:
    """Return ticks at round times of day in the local time zone."""
    step = max(1.0, _time_step(within.span, most))
    offset = datetime.fromtimestamp(within.low).astimezone().utcoffset()
    shift = offset.total_seconds() if offset is not None else 0.0
    first = math.ceil((within.low + shift) / step)
    last = min(math.floor((within.high + shift) / step), first + 4 * most)
    form = "%H:%M:%S" if step < 60 else "%H:%M"
    ticks = []
    for at in (n * step - shift for n in range(first, last + 1)):
        local = datetime.fromtimestamp(at)
        midnight = local.hour == local.minute == local.second == 0
        ticks.append(AxisTick(at, local.strftime("%d %b" if midnight else form)))
    return ticks


def clock_label(unix_s: float) -> str:
    """Format a time of day with its date: ``22 Nov 14:30:05``."""
    return datetime.fromtimestamp(unix_s).strftime("%d %b %H:%M:%S")


def _time_step(span: float, most: int) -> float:
    min_step = span / max(1, most)
    if min_step <= 1:
        return nice_step(span, most)
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
    days = nice_step(span / 86400, most) * 86400
    return next((float(s) for s in steps if s >= min_step), days)


def tick_label(value: float, step: float, largest: float = 0.0) -> str:
    """Format a tick with the digits that ``step`` needs: ``0.25``, ``1 200``, ``20 k``, ``2e-05``.

    ``largest`` is the largest value on the axis, so that all labels have the same form.
    """
    if value == 0:
        return "0"
    largest = max(abs(value), largest)
    if abs(step) < 1e-4 and largest < 1e-3:
        return f"{value:.{_exponent_digits(value, step)}e}"
    for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # No prefix if it would hide or only shift the digits in which the labels differ.
        if (largest >= 10 * scale and step >= scale / 100) or (largest >= scale and step >= scale):
            return f"{_plain(value / scale, step / scale)}{THIN}{prefix}"
    return _plain(value, step)


def _plain(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step < 1 else 0
    return f"{value:,.{min(decimals, 9)}f}".replace(",", THIN)


def _exponent_digits(value: float, step: float) -> int:
    """Return the digits after the point that ``value`` needs as a power of ten to show a step."""
    powers = math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9)
    return min(6, max(0, powers))


def log_ticks(within: AxisRange, most: int) -> list[AxisTick]:
    """Return ticks for a range of exponents of ten: decades, or 1-2-5 within a few decades."""
    first, last = math.ceil(within.low - 1e-9), math.floor(within.high + 1e-9)
    decades = list(range(first, last + 1))
    if len(decades) >= 2:
        stride = max(1, math.ceil(len(decades) / max(1, most)))
        if len(decades) * 3 > most:
            return _log_tick_list([10.0**d for d in decades[::stride]])
    low, high = 10.0**within.low, 10.0**within.high
    fine = [
        factor * 10.0**d
        for d in range(math.floor(within.low), math.ceil(within.high) + 1)
        for factor in (1, 2, 5)
        if low * (1 - 1e-9) <= factor * 10.0**d <= high * (1 + 1e-9)
    ]
    if len(fine) >= 2 and len(fine) <= max(2, most):
        return _log_tick_list(fine)
    if len(decades) >= 2:
        return _log_tick_list([10.0**d for d in decades])
    linear = linear_ticks(AxisRange(low, high), most)
    return [AxisTick(math.log10(t.at), t.label) for t in linear if t.at > 0]


def _log_tick_list(values: Sequence[float]) -> list[AxisTick]:
    """Return ticks at values, all with labels of one form: ``0.001``, ``0.5``, or ``5e-07``."""
    plain = min(values) >= 1e-3 * (1 - 1e-9) and max(values) < 1e6 * (1 + 1e-9)
    labels = [
        tick_label(v, 10.0 ** math.floor(math.log10(v) + 1e-9)) if plain else f"{v:.0e}"
        for v in values
    ]
    return [AxisTick(math.log10(v), label) for v, label in zip(values, labels, strict=True)]


class Viewport(Struct, frozen=True, kw_only=True):
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
