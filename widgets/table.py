"""A table of live rows that repaints only the cells that changed.

Only visible lines are drawn, so a thousand rows cost no more than the visible ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.segment import Segment
from textual import events, on
from textual.binding import BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ltui.widgets.columns import (
    Cells,
    Column,
    LazyRows,
    PlacedColumn,
    centred,
    changed_columns,
    cut_line,
    fit_columns,
    row_line,
    scrolled_columns,
    title_line,
)
from ltui.widgets.formats import LOADING
from ltui.widgets.make_bindings import bindings
from ltui.widgets.palette import cells_strip, line_styles
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

Row = TypeVar("Row")

_CURSOR_SIGN = "▸ "
"""Marks the row under the cursor. Other rows begin with blanks of the same width."""


class Table(ScrollView, Generic[Row], can_focus=True):
    """A table of live rows. Subclasses define the columns and the cells of a row."""

    DEFAULT_CSS = """
    Table { height: 1fr; width: 1fr; overflow-x: hidden; overflow-y: auto;
            scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "table",
        """
        up       | move(-1) | up        | Move the cursor to the previous row
        down     | move(1)  | down      | Move the cursor to the next row
        pageup   | page(-1) | page up   | Move the cursor up by one page
        pagedown | page(1)  | page down | Move the cursor down by one page
        home     | end(-1)  | first     | Move the cursor to the first row
        end      | end(1)   | last      | Move the cursor to the last row
        enter    | select   | open      | Open the row under the cursor
        """,
    )
    COLUMNS: ClassVar[tuple[Column, ...]] = ()
    NOTE: ClassVar[str] = "nothing yet"
    """Text in the middle of an empty table, unless ``note`` is set."""
    KEEPS_CURSOR: ClassVar[bool] = True
    """Mark the row under the cursor even if the table does not have the focus."""
    SCROLLS_SIDEWAYS: ClassVar[bool] = False
    """Columns that do not fit can be scrolled to; otherwise the least important are left out."""

    cursor: reactive[int] = reactive(0, repaint=False)
    note: reactive[str | None] = reactive(None)

    @dataclass
    class RowSelected(Message):
        """A row was opened with Enter or a double click."""

        table: Table[Any]
        key: str

    @dataclass
    class RowHighlighted(Message):
        """The cursor moved to another row; ``key`` is None if the table is empty."""

        table: Table[Any]
        key: str | None

    @dataclass
    class ColumnsHidden(Message):
        """The number of columns changed that are hidden to the left and to the right."""

        table: Table[Any]

    @dataclass
    class TitleClicked(Message):
        """The title of a column was clicked."""

        table: Table[Any]
        column: str

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._rows: Sequence[Row] = ()
        self._placed: tuple[PlacedColumn, ...] = ()
        self._keys: tuple[str, ...] = ()
        self._cells: dict[str, tuple[Row, Mapping[str, Cells]]] = {}
        self._is_loading = True
        """True until the first rows are set, even if these are none."""
        self._scrolled = 0
        """Number of columns after the first one that are scrolled out to the left."""
        self.hidden = (0, 0)
        """Number of columns that are hidden to the left and to the right."""

    # For subclasses

    def key_of(self, row: Row) -> str:
        """Return the key that identifies a row when its values change."""
        raise NotImplementedError

    def cells_of(self, row: Row) -> Mapping[str, Cells]:
        """Return the cells of a row by column key."""
        raise NotImplementedError

    def line_of(self, row: Row) -> Cells | None:  # noqa: ARG002 - for subclasses
        """Return a line over all columns, in place of the cells of the row; None for its cells."""
        return None

    def columns_of(self, rows: Sequence[Row]) -> Sequence[Column]:  # noqa: ARG002 - for subclasses
        """Return the columns for these rows."""
        return self.COLUMNS

    # Rows

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all rows."""
        return self._keys

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Replace all rows. The cursor stays on its row; if that is gone, it keeps its position.

        Of ``LazyRows`` only the visible ones are built.
        """
        old, old_keys, old_key = self._rows, self._keys, self.cursor_key
        if isinstance(rows, LazyRows):
            self._rows, keys = rows, rows.keys
        else:
            self._rows = tuple(rows)
            keys = tuple(self.key_of(r) for r in self._rows)
        self._keys = keys
        if self._is_loading:
            self._is_loading = False
            self.refresh()
        if not self.is_mounted:
            return
        placed = self._placed_columns()
        if keys == old_keys and placed == self._placed:
            self._repaint_changes(old)
            return
        self._placed = placed
        self._cells.clear()
        self._update_virtual_size()
        self.refresh()
        cursor = keys.index(old_key) if old_key in keys else min(self.cursor, len(keys) - 1)
        self.set_reactive(Table.cursor, max(0, cursor))
        if self.cursor_key != old_key:
            self._post_highlighted()

    def _repaint_changes(self, old: Sequence[Row]) -> None:
        top = self.scroll_offset.y
        for index in range(top, min(len(self._rows), top + self.size.height)):
            before, now = old[index], self._rows[index]
            if before is now or before == now:
                continue
            if self.line_of(now) is not None:
                self._repaint_row(index)
                continue
            places = changed_columns(
                self._cached_cells(before), self._cached_cells(now), self._placed
            )
            if places:
                # One region per row: many small regions cost Textual more than the cells between.
                left, right = places[0].x, places[-1].x + places[-1].width
                self.refresh(Region(len(_CURSOR_SIGN) + left, index - top + 1, right - left, 1))

    def _cached_cells(self, row: Row) -> Mapping[str, Cells]:
        """Return the cells of a row, cached by key: every repaint needs them again."""
        key = self.key_of(row)
        cached = self._cells.get(key)
        if cached is None or cached[0] is not row:
            cached = self._cells[key] = (row, self.cells_of(row))
        return cached[1]

    def _placed_columns(self) -> tuple[PlacedColumn, ...]:
        width = self.scrollable_content_region.width - len(_CURSOR_SIGN)
        rows = self._rows.samples() if isinstance(self._rows, LazyRows) else self._rows
        columns = self.columns_of(rows)
        if not self.SCROLLS_SIDEWAYS:
            return fit_columns(columns, max(1, width))
        shown = scrolled_columns(columns, max(1, width), self._scrolled)
        self._scrolled = shown.left
        if (shown.left, shown.right) != self.hidden:
            self.hidden = (shown.left, shown.right)
            self.post_message(self.ColumnsHidden(self))
        return shown.placed

    def action_sideways(self, by: int) -> None:
        """Scroll the columns after the first one."""
        if by < 0 or self.hidden[1]:
            self._scrolled = max(0, self._scrolled + by)
            self.on_resize()

    @on(events.MouseScrollDown)
    @on(events.MouseScrollUp)
    @on(events.MouseScrollRight)
    @on(events.MouseScrollLeft)
    def _wheel_sideways(self, event: events.MouseEvent) -> None:
        """Scroll the columns by the wheel with shift, or by a wheel that turns sideways."""
        is_sideways = isinstance(event, (events.MouseScrollRight, events.MouseScrollLeft))
        if self.SCROLLS_SIDEWAYS and (is_sideways or event.shift):
            event.stop()
            event.prevent_default()
            forwards = isinstance(event, (events.MouseScrollDown, events.MouseScrollRight))
            self.action_sideways(1 if forwards else -1)

    def _update_virtual_size(self) -> None:
        width = max(1, self.scrollable_content_region.width)
        self.virtual_size = Size(width, len(self._rows) + 1)

    def on_mount(self) -> None:
        self._update_virtual_size()

    def on_resize(self) -> None:
        self._placed = self._placed_columns()
        self._update_virtual_size()
        self.refresh()

    def watch_show_vertical_scrollbar(self) -> None:
        """Fit the columns again: the scrollbar takes a column without a resize of the table."""
        if self.is_mounted:
            self.on_resize()

    # Drawing

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        if not self._rows:
            empty = LOADING if self._is_loading else self.NOTE
            note = empty if self.note is None else self.note
            is_middle = y == max(0, (height - 1) // 2)
            return cells_strip(centred(note, width) if is_middle else (), width, self)
        index = self.scroll_offset.y + y - 1
        if y and index >= len(self._rows):
            return Strip.blank(width, self.visual_style.rich_style)
        focused = self.has_focus
        is_current = y > 0 and index == self.cursor and (self.KEEPS_CURSOR or focused)
        sign = Cell(
            text=_CURSOR_SIGN if is_current else " " * len(_CURSOR_SIGN),
            tone=Tone.PLAIN if focused else Tone.DIM,
        )
        if y:
            row = self._rows[index]
            line = self.line_of(row)
            if line is None:
                cells = row_line(self._cached_cells(row), self._placed)
            else:
                cells = cut_line(line, width - len(_CURSOR_SIGN))
        else:
            cells = title_line(self._placed)
        strip = cells_strip((sign, *cells), width, self)
        if not (is_current and focused):
            return strip
        selected = line_styles(self.app).selected
        return Strip(Segment.apply_style(strip, post_style=selected), width)

    # The cursor

    @property
    def cursor_key(self) -> str | None:
        return self._keys[self.cursor] if self.cursor < len(self._keys) else None

    def validate_cursor(self, cursor: int) -> int:
        return max(0, min(cursor, len(self._rows) - 1))

    def watch_cursor(self, old: int, new: int) -> None:
        if old == new or not self.is_mounted:
            return
        self._show_cursor()
        for index in (old, new):
            self._repaint_row(index)
        self._post_highlighted()

    def _post_highlighted(self) -> None:
        # The table is the sender also while a handler of its parent fills it. Else the message
        # would end there.
        self.post_message(self.RowHighlighted(self, self.cursor_key).set_sender(self))

    def _show_cursor(self) -> None:
        """Scroll until the row under the cursor is visible below the column titles."""
        top, visible_rows = self.scroll_offset.y, max(1, self.scrollable_content_region.height - 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + visible_rows:
            self.scroll_to(y=self.cursor - visible_rows + 1, animate=False)

    def action_move(self, by: int) -> None:
        self.cursor += by

    def action_page(self, direction: int) -> None:
        self.cursor += direction * max(1, self.size.height - 2)

    def action_end(self, direction: int) -> None:
        self.cursor = 0 if direction < 0 else len(self._rows) - 1

    def action_select(self) -> None:
        if self.cursor_key is not None:
            self.post_message(self.RowSelected(self, self.cursor_key))

    def _repaint_row(self, index: int) -> None:
        self.refresh(Region(0, index - self.scroll_offset.y + 1, self.size.width, 1))

    @on(events.Focus)
    @on(events.Blur)
    def _focus_moved(self) -> None:
        self._repaint_row(self.cursor)

    def on_click(self, event: events.Click) -> None:
        index = event.y - 1 + self.scroll_offset.y
        if event.y == 0 and self._rows:
            x = event.x - len(_CURSOR_SIGN)
            for placed in self._placed:
                if placed.x <= x < placed.x + placed.width:
                    self.post_message(self.TitleClicked(self, placed.column.key))
        if event.y >= 1 and 0 <= index < len(self._rows):
            self.cursor = index
            if event.chain == 2:
                self.action_select()
