"""Bars and strips: one number, or the recent numbers, as block characters of a fixed width.

Pure. A missing number is drawn as a blank and never as zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

HEIGHTS = "▁▂▃▄▅▆▇"
"""Blocks of rising height. There are seven, because a full block would touch the row above."""


def bar_cells(share: float | None, width: int, tone: Tone = Tone.PLAIN) -> tuple[Cell, ...]:
    """Return a bar of ``width`` cells for a fraction, to half a cell; blanks if it is unknown.

    Its filled part is in ``tone``, the rest faint.

    The bar is a thin line, because blocks in adjacent rows would merge. A small fraction is always
    visible, and a fraction below 1 never fills the bar.
    """
    if share is None or not math.isfinite(share):
        return (Cell(text=" " * width),)
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    if 0 < share < 1:
        halves = min(2 * width - 1, max(1, halves))
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    track = "┈" * (width - len(filled))
    return Cell(text=filled, tone=tone), Cell(text=track, tone=Tone.FAINT)


def strip(values: Sequence[float], width: int, *, high: float | None = None) -> str:
    """Return the newest ``width`` values as blocks, the newest on the right; NaN is a gap.

    ``high`` is the value of a full block; by default the maximum of the values.
    """
    shown = list(values)[-width:] if width > 0 else []
    finite = [v for v in shown if math.isfinite(v)]
    top = high if high is not None else max(finite, default=1.0)
    return "".join(_block(v, top) for v in shown).rjust(width)


def _block(value: float, high: float) -> str:
    if not math.isfinite(value):
        return " "
    share = value / high if high > 0 else 0.0
    return HEIGHTS[min(len(HEIGHTS) - 1, max(0, math.floor(share * len(HEIGHTS))))]


def step_strip(seconds: Sequence[float], width: int) -> str:
    """Return a strip of step times in which usual steps are low, so that a slow one is visible."""
    finite = [v for v in list(seconds)[-width:] if math.isfinite(v)]
    if not finite:
        return " " * width
    return strip(seconds, width, high=max(4 * median(finite), max(finite)) or 1.0)
