"""The legend of a chart: the names and values of its series in one line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len, set_cell_size

from ltui.widgets import formats
from ltui.widgets.charts.axis_scale import clock_label
from ltui.widgets.charts.canvas import Canvas
from ltui.widgets.charts.chart_options import INK_DIM, INK_TEXT, ChartOptions, ink_of, marker_of
from ltui.widgets.view_models import ChartSeries, ChartViewModel

_GAP = "   "
_LEAST_NAME = 8
"""Minimum cells of a shortened name; if that does not fit, an entry is omitted."""


class _Entry(Struct, frozen=True, kw_only=True):
    """The legend of one series: its sign, name and value."""

    series: ChartSeries
    name: str
    value: str

    @property
    def text(self) -> str:
        return " ".join(part for part in (marker_of(self.series), self.name, self.value) if part)


def draw_legend(canvas: Canvas, view_model: ChartViewModel, options: ChartOptions) -> int:
    """Draw names and values: of the last points, or of the points at the crosshair.

    Return the column behind them.
    """
    x = 1
    has_values = view_model.shows_values or options.cursor is not None
    if not has_values and len(view_model.series) == 1:
        return 0
    if options.cursor is not None:
        x = canvas.write(x, 0, position_text(view_model, options.cursor), INK_TEXT) + len(_GAP)
    # If not all fit, the entries of faint curves are omitted first.
    ordered = sorted(view_model.series, key=lambda s: s.dim)
    entries = [
        _Entry(
            series=s,
            name=s.name,
            value=value_text(s, options.cursor, view_model.is_rate) if has_values else "",
        )
        for s in ordered
    ]
    shown = _fitting(entries, canvas.width - x, names=options.cursor is None)
    for entry in shown:
        end = canvas.write(x, 0, entry.text, INK_DIM)
        canvas.write(x, 0, marker_of(entry.series), ink_of(entry.series, faint=entry.series.dim))
        canvas.write(end - cell_len(entry.value), 0, entry.value, INK_TEXT)
        x = end + len(_GAP)
    left_out = sum(not s.dim for s in ordered) - sum(not e.series.dim for e in shown)
    if left_out > 0:
        return canvas.write(x, 0, f"+{left_out}", INK_DIM)
    return x - len(_GAP)


def _fitting(entries: Sequence[_Entry], room: int, *, names: bool) -> list[_Entry]:
    """Return the entries that fit: without faint curves, with short names, then fewer entries.

    Values are never shortened, because the present loss is what the user wants to read. With a
    crosshair (``names`` is False) no value is omitted; if necessary, the names are.
    """
    clear = [e for e in entries if not e.series.dim] or list(entries)
    plain = [replace(e, name=e.name.removesuffix(e.series.suffix)) for e in clear]
    for shown in (list(entries), clear, plain):
        if _width(shown) <= room:
            return shown
    clear = plain
    if not names and (short := _shortened(clear, room)) is not None:
        return short
    if not names:
        clear = [replace(e, name="") for e in clear]
    for count in range(len(clear), 0, -1):
        short = _shortened(clear[:count], room - (0 if count == len(clear) else len(_GAP) + 3))
        if short is not None:
            return short
    return [replace(clear[0], value="")] if names else []


def _shortened(entries: Sequence[_Entry], room: int) -> list[_Entry] | None:
    """Return the entries with names cut to one width; None if they do not fit at the minimum."""
    longest = max(cell_len(e.name) for e in entries)
    for cells in range(longest, min(longest, _LEAST_NAME) - 1, -1):
        cut = [replace(e, name=_cut(e.name, cells)) for e in entries]
        if _width(cut) <= room:
            return cut
    return None


def _cut(name: str, cells: int) -> str:
    """Cut a name in the middle, because related names often differ only at their ends."""
    if cell_len(name) <= cells:
        return name
    head = set_cell_size(name, cells // 2).rstrip()
    tail = name[::-1]
    while cell_len(tail) > cells - 1 - cell_len(head):
        tail = tail[:-1]
    return f"{head}…{tail[::-1]}"


def _width(entries: Sequence[_Entry]) -> int:
    return sum(cell_len(e.text) for e in entries) + len(_GAP) * max(0, len(entries) - 1)


def value_at(series: ChartSeries, x: float) -> tuple[float, float] | None:
    """Return the point nearest to ``x``; None if the series is empty. At a gap the value is NaN."""
    if not series.x.size:
        return None
    right = int(np.searchsorted(series.x, x))
    near = [i for i in (right - 1, right) if 0 <= i < series.x.size]
    best = min(near, key=lambda i: abs(float(series.x[i]) - x))
    return float(series.x[best]), float(series.y[best])


def value_text(series: ChartSeries, cursor: float | None, is_rate: bool = False) -> str:
    """Return the value at the crosshair, or the newest one."""
    if cursor is not None:
        point = value_at(series, cursor)
        value = point[1] if point else None
    else:
        value = float(series.y[-1]) if series.y.size else None
    if value is not None and not series.is_logged and not np.isfinite(value):
        return formats.NA
    return formats.rate(value, "") if is_rate else formats.metric(value)


def position_text(view_model: ChartViewModel, x: float) -> str:
    """Return a position on the x axis: ``step 1 200``, ``5 m 00 s``, ``22 Nov 14:30:05``."""
    if view_model.x_clock:
        return clock_label(x)
    if view_model.x_time:
        return formats.duration(x)
    digits = formats.count(x) if x == round(x) else formats.significant(x, 4)
    return f"{view_model.x_label} {digits}"
