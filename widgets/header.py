"""The header of a run screen: state, name and progress of the run, and its current problem."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from msgspec import Struct
from rich.cells import cell_len
from textual.reactive import reactive

from ltui.widgets.columns import Cells, bar_cells, shortened
from ltui.widgets.formats import NA, percent
from ltui.widgets.line_sheet import LiveLines
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, HeaderViewModel

BAR_WIDTH = 12
MAX_BANNER_LINES = 3
MAX_QUIET_BANNER_LINES = 2
"""Maximum lines of a banner that reports a warning or a recovery."""
MAX_NAME_WIDTH = 32
"""Maximum cells of a name or command, so that the parts behind it still fit."""
_GAP = "   "
_PROGRAM = 10
"""Importance of what the run trains."""


class _Part(Struct, frozen=True):
    """A part of the first line, shown completely or not at all."""

    cells: Cells
    importance: int
    """Rank by importance, 0 for the most important. If space is short, high numbers are omitted."""
    left: bool = False

    @property
    def width(self) -> int:
        return sum(cell_len(c.text) for c in self.cells)


def status_line(view_model: HeaderViewModel, width: int) -> Cells:
    """Return the first line in exactly ``width`` cells; the least important parts are omitted."""
    parts = _parts(view_model)
    while len(parts) > 1 and _total_width(parts) > width:
        parts.remove(max(parts, key=lambda p: p.importance))
    # What the run trains may take a part of the room that is left.
    room = min(width // 3, MAX_NAME_WIDTH + width - _total_width(parts) - len(_GAP))
    parts = [_program(view_model, room) if p.importance == _PROGRAM else p for p in parts]
    left = [p for p in parts if p.left]
    right = [p for p in parts if not p.left]
    cells = [*_joined(left)]
    free = width - _total_width(parts)
    if right:
        middle = _GAP if left else ""
        cells += [Cell(text=" " * max(0, free) + middle), *_joined(right)]
    elif free > 0:
        cells.append(Cell(text=" " * free))
    return tuple(cells)


def _parts(view_model: HeaderViewModel) -> list[_Part]:
    state = Cell(text=f"{view_model.state_sign} {view_model.state}", tone=view_model.tone)
    name = shortened(view_model.name, MAX_NAME_WIDTH)
    parts = [
        _Part((state,), 0, left=True),
        _Part((Cell(text=name, tone=Tone.ACCENT),), 1, left=True),
        _program(view_model, MAX_NAME_WIDTH),
        _Part((Cell(text=view_model.machines),), 3, left=True),
        _Part((Cell(text=view_model.epoch),), 6),
        _Part((Cell(text=view_model.step),), 2),
    ]
    if view_model.share is not None:
        parts.append(_Part(bar_cells(view_model.share, BAR_WIDTH, _bar_tone(view_model.tone)), 8))
        parts.append(_Part((Cell(text=percent(view_model.share).rjust(5)),), 5))
    parts.append(_Part((Cell(text=view_model.eta),), 4))
    parts.append(_Part((Cell(text=view_model.job, tone=Tone.DIM),), 7))
    parts.append(_Part((Cell(text=view_model.attempt, tone=Tone.DIM),), 9))
    parts.append(_Part((Cell(text=view_model.elapsed, tone=Tone.DIM),), 11))
    return [p for p in parts if p.width and p.cells[0].text != NA]


def _program(view_model: HeaderViewModel, room: int) -> _Part:
    text = shortened(view_model.preset, max(MAX_NAME_WIDTH, room))
    return _Part((Cell(text=text, tone=Tone.DIM),), _PROGRAM, left=True)


def _bar_tone(tone: Tone) -> Tone:
    return tone if tone in (Tone.BAD, Tone.WARN) else Tone.ACCENT


def _total_width(parts: Sequence[_Part]) -> int:
    return sum(p.width for p in parts) + len(_GAP) * (len(parts) - 1)


def _joined(parts: Sequence[_Part]) -> list[Cell]:
    cells: list[Cell] = []
    for part in parts:
        if cells:
            cells.append(Cell(text=_GAP))
        cells.extend(part.cells)
    return cells


def header_lines(view_model: HeaderViewModel, width: int) -> list[Cells]:
    """Return the status line, the banner and the notes."""
    below = banner_and_note_lines(view_model, width)
    return [status_line(view_model, width), *((cell,) for cell in below)]


def banner_and_note_lines(view_model: HeaderViewModel, width: int) -> tuple[Cell, ...]:
    """Return the banner and the notes, wrapped between words to ``width`` cells."""
    lines = []
    if view_model.banner:
        max_lines = (
            MAX_BANNER_LINES if view_model.banner_tone is Tone.BAD else MAX_QUIET_BANNER_LINES
        )
        wrapped = textwrap.wrap(view_model.banner, max(10, width), max_lines=max_lines)
        lines += [Cell(text=line, tone=view_model.banner_tone) for line in wrapped]
    for note in view_model.notes:
        wrapped = textwrap.wrap(note, max(10, width), max_lines=2)
        lines += [Cell(text=line, tone=Tone.WARN) for line in wrapped]
    return tuple(lines)


class RunHeader(LiveLines):
    """A widget that draws a ``HeaderViewModel`` and is as high as its banner and notes."""

    DEFAULT_CSS = """
    RunHeader { padding: 0 1; }
    """

    view_model: reactive[HeaderViewModel | None] = reactive(None, repaint=False)

    def watch_view_model(self, view_model: HeaderViewModel | None) -> None:
        if view_model is not None:
            self.show(lambda width: header_lines(view_model, width))
