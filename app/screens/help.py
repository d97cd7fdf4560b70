"""The help: all keys of the screen below, in groups, taken from its bindings."""

from __future__ import annotations

import textwrap
from itertools import zip_longest
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Input, Static, TextArea

from ltui.app.keys.footer import EVERYWHERE, SCREEN, groups_of, listed_keys, refusal_of
from ltui.app.screens.dialog import Dialog
from ltui.widgets.columns import Cells
from ltui.widgets.line_sheet import LineSheet
from ltui.widgets.make_bindings import bindings
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

TWO_COLUMNS_FROM = 100
"""Minimum cells of width for two columns of groups."""
KEYS_WIDTH = 11
"""Cells for the keys; longer ones get their own line."""
GAP = 3
"""Cells between two columns."""

TYPING = "A letter or a sign is typed into the field that has the focus. Esc leaves it."

Group = tuple[str, list[tuple[str, str, bool]]]
"""A heading, and for each line the keys, their meaning, and True if they can be used now."""


class HelpScreen(Dialog[None]):
    """A dialog with the keys of the screen below it."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "help",
        """
        escape,q,question_mark,f1,enter | dismiss | close | Close the help
        """,
    )

    def __init__(self, groups: list[Group], about: str) -> None:
        super().__init__()
        self._groups, self._about = groups, about

    @classmethod
    def of(cls, screen: Screen[object]) -> HelpScreen:
        """Return the help for ``screen``."""
        groups: list[Group] = []
        for heading, keys in groups_of(listed_keys(screen)):
            lines = [(k.keys, k.about, refusal_of(screen, k.binding.action) is None) for k in keys]
            if heading == SCREEN:
                lines += [(keys, meaning, True) for keys, meaning in EVERYWHERE]
            groups.append((heading, lines))
        about = str(getattr(screen, "ABOUT", ""))
        return cls(groups, TYPING if isinstance(screen.focused, (Input, TextArea)) else about)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -help"):
            with VerticalScroll(id="help-scroll"):
                yield LineSheet(id="help-sheet")
            yield Static(Text("esc close   ↑↓ scroll"), id="answers")

    def on_mount(self) -> None:
        self.query_one(".dialog").border_title = "keys"
        self.query_one("#help-scroll").focus()
        groups, about = self._groups, self._about
        self.query_one(LineSheet).show(lambda width: help_lines(groups, about, width))


def help_lines(groups: list[Group], about: str, width: int) -> list[Cells]:
    """Return the lines of the help, in two columns of groups if ``width`` allows it."""
    lines: list[Cells] = [(Cell(text=row),) for row in textwrap.wrap(about, max(10, width))]
    if lines:
        lines.append((Cell(text=""),))
    if width < TWO_COLUMNS_FROM:
        return [*lines, *_column(groups, width)]
    column_width = (width - GAP) // 2
    left, right = _halves(groups)
    for left_line, right_line in zip_longest(
        _column(left, column_width), _column(right, column_width), fillvalue=()
    ):
        used = sum(cell_len(cell.text) for cell in left_line)
        lines.append((*left_line, Cell(text=" " * (column_width - used + GAP)), *right_line))
    return lines


def _halves(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Split the groups into two columns of about the same height."""
    heights = [len(lines) + 2 for _, lines in groups]
    cut = min(range(len(groups) + 1), key=lambda n: abs(sum(heights[:n]) - sum(heights[n:])))
    return groups[:cut], groups[cut:]


def _column(groups: list[Group], width: int) -> list[Cells]:
    cells: list[Cells] = []
    for heading, lines in groups:
        cells += [(Cell(text=""),)] if cells else []
        cells.append((Cell(text=heading, tone=Tone.DIM),))
        for keys, meaning, usable in lines:
            cells += _key_lines(keys, meaning, usable, width)
    return cells


def _key_lines(keys: str, meaning: str, usable: bool, width: int) -> list[Cells]:
    key_tone, text_tone = (Tone.ACCENT, Tone.PLAIN) if usable else (Tone.DIM, Tone.DIM)
    # Without colours, a dim line is hardly told from another one.
    meaning = meaning if usable else f"{meaning} (not now)"
    rows = textwrap.wrap(meaning, max(10, width - KEYS_WIDTH - 2)) or [""]
    indent = " " * (KEYS_WIDTH + 2)
    cells: list[Cells] = []
    if cell_len(keys) > KEYS_WIDTH:
        cells.append((Cell(text=f"  {set_cell_size(keys, width - 2).rstrip()}", tone=key_tone),))
        first = (Cell(text=indent), Cell(text=rows[0], tone=text_tone))
    else:
        pad = " " * (KEYS_WIDTH - cell_len(keys))
        first = (Cell(text=f"{pad}{keys}  ", tone=key_tone), Cell(text=rows[0], tone=text_tone))
    cells.append(first)
    cells += [(Cell(text=f"{indent}{row}", tone=text_tone),) for row in rows[1:]]
    return cells
