"""Heat strips: the utilisation of many GPUs over the last minutes, as lines of cells. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from ltui.widgets.bars import strip
from ltui.widgets.columns import Cells
from ltui.widgets.formats import duration
from ltui.widgets.gpu_table import SIGNS
from ltui.widgets.view_models import Cell, GpuRow, Tone

LEAST_WIDTH = 23
"""Minimum cells for one GPU: sign, number, a readable strip and a percentage."""
NARROW_WIDTH = 13
"""Minimum cells for one GPU if there are more GPUs than lines at ``LEAST_WIDTH``."""
SHORT_LABEL = 5
"""Maximum cells of a label for which the widths above are enough: ``15/6``."""
GAP = 2
"""Cells between two columns of GPUs."""
_PERCENT_CELLS = 6
_LOW, _HIGH = 0.34, 0.67
"""Limits between faint, dim and bright blocks, as fractions of full utilisation."""


def heat_lines(rows: Sequence[GpuRow], most_lines: int, block_s: float, width: int) -> list[Cells]:
    """Return a legend, and a strip for each GPU. Tall, bright blocks mean high utilisation.

    There are at most ``most_lines`` lines below the legend, if the GPUs fit side by side. A block
    represents ``block_s`` seconds.
    """
    if not rows:
        return []
    label_width = max(len(row.index) for row in rows)
    columns = _columns(len(rows), most_lines, width, max(0, label_width - SHORT_LABEL))
    lines = math.ceil(len(rows) / columns)
    column_width = (width - GAP * (columns - 1)) // columns
    cells = max(1, column_width - label_width - 3 - _PERCENT_CELLS)
    drawn: list[Cells] = [(Cell(text=_legend(rows, cells, block_s), tone=Tone.DIM),)]
    for y in range(lines):
        line: list[Cell] = []
        for row in rows[y::lines]:
            line += [Cell(text=" " * GAP)] if line else []
            line += [
                Cell(text=f"{SIGNS.get(row.tone, ' ')} ", tone=row.tone),
                Cell(
                    text=f"{row.index:>{label_width}} ", tone=Tone.DIM if row.stale else Tone.PLAIN
                ),
                *_shades(row.heat, cells, stale=row.stale),
                _percentage(row),
            ]
        drawn.append(tuple(line))
    return drawn


def _columns(count: int, most_lines: int, width: int, extra: int) -> int:
    """Return the number of columns of strips. ``extra``: cells that long labels need."""
    fitting = max(1, (width + GAP) // (LEAST_WIDTH + extra + GAP))
    if math.ceil(count / fitting) > most_lines:
        fitting = max(1, (width + GAP) // (NARROW_WIDTH + extra + GAP))
    return min(fitting, max(1, math.ceil(count / max(1, most_lines))))


def _legend(rows: Sequence[GpuRow], cells: int, block_s: float) -> str:
    """Return the explanation of the blocks, with the time that a strip covers."""
    covered = min(cells, max(len(row.heat) for row in rows)) * block_s
    span = f"utilisation, last {duration(round(covered))}" if covered else "utilisation"
    return f"  {span}   ▁ 0 %  ▇ 100 %"


def _percentage(row: GpuRow) -> Cell:
    """Return the current utilisation, or the word that there is none."""
    if row.stale:
        return Cell(text="old".rjust(_PERCENT_CELLS), tone=Tone.DIM)
    return Cell(text=row.utilisation_text.rjust(_PERCENT_CELLS))


def _shades(values: Sequence[float], width: int, *, stale: bool) -> list[Cell]:
    """Return the strip, with low values nearer to the background, and old ones all dim."""
    shown = list(values)[-width:]
    shades = [Tone.FAINT] * (width - len(shown)) + [Tone.DIM if stale else _shade(v) for v in shown]
    blocks = zip(strip(shown, width, high=1.0), shades, strict=True)
    return [
        Cell(text="".join(block for block, _ in run), tone=tone)
        for tone, run in groupby(blocks, key=lambda block: block[1])
    ]


def _shade(value: float) -> Tone:
    if not math.isfinite(value) or value < _LOW:
        return Tone.FAINT
    return Tone.DIM if value < _HIGH else Tone.ACCENT
