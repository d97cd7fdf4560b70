"""A log view that follows the newest line and can be searched. Text is never parsed as markup."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from ltui.widgets.columns import centred
from ltui.widgets.formats import LOADING, NA
from ltui.widgets.log_rows import LogBuffer, LogLevel, LogRows, occurrences, shown_text, unfolded
from ltui.widgets.make_bindings import bindings
from ltui.widgets.palette import LineStyles, cells_strip, line_styles
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine

MAX_LINES = 5000
RANK_CELLS = 5
"""Cells for the rank before a line, unless there are longer labels."""
TIME_CELLS = 9
"""Cells for the time of day before a line."""


class LogLines(ScrollView, can_focus=True):
    """The scrolling lines. ``LogView`` adds the search line below them."""

    # No horizontal scrollbar: it would take a row from the lines.
    DEFAULT_CSS = """
    LogLines { height: 1fr; width: 1fr; scrollbar-size: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "log",
        """
        f | toggle('follow') | follow | Follow the newest line, or stay
        w | toggle('wrap')   | wrap   | Wrap long lines, or scroll sideways
        L | next_level       | level  | All lines, warnings and errors, or errors only
        u | toggle_fold      | unfold | Show the start-up lines of frameworks, or fold them
        T | toggle('times')  | times  | Show when lines arrived (only if ltui watched at that time)
        """,
    )

    follow: reactive[bool] = reactive(True, repaint=False)
    """Keep the newest line in view as lines arrive."""
    show_ranks: reactive[bool] = reactive(True)
    rank_labels: reactive[Mapping[int, str]] = reactive({})
    """Labels by ``LogLine.source`` if they are not ``r0``, such as ``gpu-b:12``."""
    wrap: reactive[bool] = reactive(True)
    """Wrap long lines; otherwise scroll sideways to read them."""
    times: reactive[bool] = reactive(False)
    """Show when each line was read; n/a for lines that were in the file at the start."""
    level: reactive[LogLevel] = reactive(LogLevel.ALL)
    note: reactive[str] = reactive(LOADING)
    """Text in the middle while there are no lines."""

    class ModeChanged(Message):
        """The view started or stopped following the newest line, or filters by another level."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = LogBuffer(MAX_LINES)
        self._rows = LogRows(self._lines)
        self._widest = 0
        self._rank_cells = RANK_CELLS
        self.query_text = ""
        self._current_hit: int | None = None
        """Number of the line at which the last search stopped."""

    def set_lines(self, lines: Iterable[LogLine]) -> None:
        """Replace all lines."""
        self._lines.clear()
        self._widest = 0
        self._current_hit = None
        self.extend(lines)

    def extend(self, lines: Iterable[LogLine]) -> None:
        """Add lines at the end; the oldest ones beyond the limit are dropped."""
        new = list(lines)
        self._lines.extend(new)
        # 8 more cells for the count of identical lines.
        self._widest = max(self._widest, *(cell_len(n.text) + 8 for n in new), 0)
        dropped = self._rows.update()
        self._update_virtual_size()
        if self.follow:
            self._scroll_to_end()
        elif dropped:
            # Keep the same text in view: it moves up by the dropped rows.
            self.scroll_to(y=max(0, self.scroll_y - dropped), animate=False, force=True)
        self.refresh()

    def _update_virtual_size(self) -> None:
        width = 0 if self.wrap else self._widest + self._prefix_cells()
        self.virtual_size = Size(width, len(self._rows))

    def _scroll_to_end(self) -> None:
        # Force it: Textual does not scroll while the scrollbar is still hidden.
        self.scroll_end(animate=False, immediate=True, x_axis=False, force=True)

    def _lay_out(self) -> None:
        """Wrap all lines again. The end, or else the line at the top, stays in view."""
        if not self.is_mounted:
            return
        top = self.scroll_offset.y
        number = self._rows[top].number if top < len(self._rows) else self._lines.first
        self._rows.lay_out(self._wrap_cells(), self.level)
        self._update_virtual_size()
        if self.follow:
            self._scroll_to_end()
        else:
            self.scroll_to(y=self._rows.index_of(number), animate=False, force=True)
        self.refresh()

    def _wrap_cells(self) -> int | None:
        # One cell is reserved for the scrollbar, so that rows do not change when it appears.
        return self.size.width - 1 - self._prefix_cells() if self.wrap and self.size.width else None

    def _prefix_cells(self) -> int:
        return (TIME_CELLS if self.times else 0) + (self._rank_cells if self.show_ranks else 0)

    def on_resize(self) -> None:
        # The size is unknown before, and the scroll offset of the end depends on it.
        if self._rows.width != self._wrap_cells():
            self._lay_out()
        elif self.follow:
            self._scroll_to_end()

    def watch_wrap(self) -> None:
        self.scroll_x = 0
        self._lay_out()

    watch_show_ranks = watch_times = _lay_out

    def watch_rank_labels(self, labels: Mapping[int, str]) -> None:
        longest = max(map(cell_len, labels.values()), default=0)
        self._rank_cells = max(RANK_CELLS, longest + 1)
        self._lay_out()

    def watch_level(self) -> None:
        self._lay_out()
        self.post_message(self.ModeChanged())

    def action_toggle_fold(self) -> None:
        """Show the lines of frameworks one by one, or as one line again."""
        lines = list(unfolded(self._lines))
        self._lines.folds = not self._lines.folds
        self.set_lines(lines)

    def action_next_level(self) -> None:
        self.level = self.level.next()

    def __len__(self) -> int:
        return len(self._lines)

    def text(self) -> str:
        """Return all stored lines as plain text."""
        return "\n".join(line.text for line in unfolded(self._lines))

    def watch_follow(self, follow: bool) -> None:
        if follow:
            self._scroll_to_end()
        self.post_message(self.ModeChanged())

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        # If all rows fit, the view moved up without being scrolled.
        fits = len(self._rows) <= self.size.height
        if new_value < old_value and new_value < self.max_scroll_y and not fits:
            self.follow = False
        elif new_value >= self.max_scroll_y > 0:
            self.follow = True

    # Search

    def search(self, query: str) -> int:
        """Highlight ``query`` in all lines, and return the number of lines that contain it."""
        self.query_text = query
        self._current_hit = None
        self.refresh()
        return len(self.hits())

    def hits(self) -> Sequence[int]:
        """Return the indices of the shown lines that contain the query."""
        hits = self._lines.hits(self.query_text)
        if self.level is LogLevel.ALL:
            return hits
        return [hit for hit in hits if self.level.shows(self._lines[hit])]

    def seek(self, direction: int) -> int | None:
        """Scroll to the next (1) or previous (-1) hit, cyclically, and return its index."""
        hits = self.hits()
        if not hits:
            return None
        now = self._search_start(direction)
        if self._current_hit is not None:
            now = self._current_hit - self._lines.first
        later = [i for i, line in enumerate(hits) if (line - now) * direction > 0]
        index = (later[0] if direction > 0 else later[-1]) if later else (direction - 1) // 2
        index %= len(hits)
        self._current_hit = hits[index] + self._lines.first
        self.follow = False
        row = self._rows.index_of(self._current_hit)
        self.scroll_to(y=max(0, row - self.size.height // 2), animate=False, force=True)
        self.refresh()
        return index

    def _search_start(self, direction: int) -> int:
        """Return the line before the first one to search; the visible lines are searched first."""
        if not len(self._rows):
            return 0
        row = self.scroll_offset.y + (self.size.height - 1 if direction < 0 else 0)
        number = self._rows[min(row, len(self._rows) - 1)].number
        return number - self._lines.first - direction

    # Drawing

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        base, styles = self.visual_style.rich_style, line_styles(self.app)
        if not len(self._rows):
            note = f"no lines to show: {self.level.value}" if len(self._lines) else self.note
            is_middle = y == (height - 1) // 2
            return cells_strip(centred(note, width) if is_middle else (), width, self)
        index = self.scroll_offset.y + y
        if index >= len(self._rows):
            return Strip.blank(width, base)
        row = self._rows[index]
        line = self._lines[row.number - self._lines.first]
        text = _styled_text(line, styles, self.query_text)[row.begin : row.end]
        prefix = self._prefix(line, styles) if row.begin == 0 else Text(" " * self._prefix_cells())
        if self._current_hit == row.number:
            text.stylize(styles.selected)
            prefix.stylize(styles.selected)
        # Only the text is scrolled sideways; time and rank stay in view.
        left, text_width = self.scroll_offset.x, max(0, width - prefix.cell_len)
        strips = (
            Strip(prefix.render(self.app.console, end="")),
            Strip(text.render(self.app.console, end="")).crop_extend(left, left + text_width, base),
        )
        return Strip.join(strips).adjust_cell_length(width, base).apply_style(base)

    def _prefix(self, line: LogLine, styles: LineStyles) -> Text:
        text = Text(no_wrap=True, end="")
        if self.times:
            text.append(_time_of_day(line.seen_at), styles.of(Tone.DIM))
        if self.show_ranks:
            ranks = styles.series
            ink = styles.of(Tone.DIM) if line.rank is None else ranks[line.rank % len(ranks)]
            plain = "" if line.rank is None else f"r{line.rank}"
            name = self.rank_labels.get(line.source, plain)
            text.append(set_cell_size(name, self._rank_cells - 1) + " ", ink)
        return text


def _time_of_day(seen_at: float | None) -> str:
    if seen_at is None:
        return NA.rjust(TIME_CELLS - 1) + " "
    return time.strftime("%H:%M:%S ", time.localtime(seen_at))


def _styled_text(line: LogLine, styles: LineStyles, query: str) -> Text:
    text = Text(shown_text(line), styles.of(line.tone), no_wrap=True, end="")
    for begin in occurrences(line.text, query):
        text.stylize(styles.match, begin, begin + len(query))
    if line.count > 1:
        text.stylize(styles.of(Tone.DIM), len(line.text))
    return text


class LogView(Vertical):
    """A log and its search line, which the key ``/`` opens."""

    DEFAULT_CSS = """
    LogView { height: 1fr; width: 1fr; }
    LogView > #log-search { display: none; height: 1; }
    LogView.-searching > #log-search { display: block; }
    LogView #log-query { width: 1fr; border: none; height: 1; padding: 0 1; }
    LogView #log-hits { width: auto; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "log",
        """
        slash     | find     | find         | Search in the log
        n         | seek(1)  | next         | Next match
        N,shift+n | seek(-1) | previous     | Previous match
        escape    | leave    | close search | Close the search
        """,
    )

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self.lines = LogLines()

    def compose(self) -> ComposeResult:
        yield self.lines
        with Horizontal(id="log-search"):
            yield Input(placeholder="find", id="log-query", compact=True)
            yield Static("", id="log-hits", markup=False)

    def action_find(self) -> None:
        self.add_class("-searching")
        self.query_one("#log-query", Input).focus()

    def action_seek(self, direction: int) -> None:
        self._show_position(self.lines.seek(direction))

    def action_leave(self) -> None:
        """Close the search and clear the query."""
        self.remove_class("-searching")
        self.query_one("#log-query", Input).value = ""
        self.lines.search("")
        self.lines.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        if action == "leave":
            return self.has_class("-searching")
        return True

    @on(Input.Changed, "#log-query")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.lines.search(event.value)
        self._show_position(None)

    @on(Input.Submitted, "#log-query")
    def _entered(self, event: Input.Submitted) -> None:
        """Scroll to the last hit and move the focus to the lines."""
        event.stop()
        self.lines.focus()
        self._show_position(self.lines.seek(-1))

    def _show_position(self, index: int | None) -> None:
        hits = len(self.lines.hits()) if self.lines.query_text else 0
        if not self.lines.query_text:
            text = ""
        elif index is None:
            text = f"{hits} found" if hits else "not found"
        else:
            text = f"{index + 1} of {hits}"
        self.query_one("#log-hits", Static).update(text)
