"""Lines of a log: bounded, following its end, with search. Shows text as it is, never as markup."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from ltui.widgets.formats import NA
from ltui.widgets.log_lines import LogBuffer, occurrences
from ltui.widgets.log_rows import LogLevel, LogRows, shown_text
from ltui.widgets.palette import LineStyles, line_styles
from ltui.widgets.view_models import LogLine, Tone

MAX_LINES = 5000
RANK_CELLS = 5
TIME_CELLS = 9
FOLLOW_TIP = "Follow the newest line, or stay"
WRAP_TIP = "Wrap long lines, or scroll sideways"
LEVEL_TIP = "All lines, warnings and errors, or errors only"
TIMES_TIP = "Show when lines arrived (only lines that arrived while ltui watched)"


class LogLines(ScrollView, can_focus=True):
    """The lines themselves. ``LogView`` adds the search line below them."""

    # No horizontal scrollbar: it would take a row from the lines.
    DEFAULT_CSS = """
    LogLines { height: 1fr; width: 1fr; scrollbar-size: 0 1; }
    """

    follow: reactive[bool] = reactive(True, repaint=False)
    """Stay at the end as lines arrive."""
    show_ranks: reactive[bool] = reactive(True)
    wrap: reactive[bool] = reactive(True)
    """Continue long lines in the next row; otherwise they are reached by scrolling sideways."""
    show_times: reactive[bool] = reactive(False)
    """Show when each line arrived; n/a for lines that were in the file before."""
    level: reactive[LogLevel] = reactive(LogLevel.ALL)
    note: reactive[str] = reactive("nothing written yet")

    class FollowChanged(Message):
        def __init__(self, lines: LogLines, follow: bool) -> None:
            super().__init__()
            self.lines = lines
            self.follow = follow

        @property
        def control(self) -> LogLines:
            return self.lines

    class LevelChanged(Message):
        """Other lines are shown."""

        def __init__(self, lines: LogLines) -> None:
            super().__init__()
            self.lines = lines

        @property
        def control(self) -> LogLines:
            return self.lines

    def __init__(self, *, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._lines = LogBuffer(max_lines)
        self._rows = LogRows(self._lines)
        self._widest = 0
        self._query = ""
        self._pen: tuple[Style, LineStyles] | None = None
        self._found: int | None = None

    def set_lines(self, lines: Iterable[LogLine]) -> None:
        """Show these instead of what is there."""
        self._lines.clear()
        self._widest = 0
        self._found = None
        self.extend(lines)

    def extend(self, lines: Iterable[LogLine]) -> None:
        """Add lines at the end, drop the oldest beyond the bound."""
        new = list(lines)
        self._lines.extend(new)
        # Room for the count of identical lines.
        self._widest = max(self._widest, *(cell_len(n.text) + 8 for n in new), 0)
        dropped = self._rows.update()
        self._size_rows()
        if self.follow:
            self._to_end()
        elif dropped:
            # The reader's place moves up with the text.
            self.scroll_to(y=max(0, self.scroll_y - dropped), animate=False, force=True)
        self.refresh()

    def _size_rows(self) -> None:
        width = 0 if self.wrap else self._widest + self._prefix_cells()
        self.virtual_size = Size(width, len(self._rows))

    def _to_end(self) -> None:
        # By force: while the scrollbar is not shown yet, Textual refuses to scroll.
        self.scroll_end(animate=False, immediate=True, x_axis=False, force=True)

    def _lay_out(self) -> None:
        """Lay out all rows again; the end, or the line at the top, stays in view."""
        if not self.is_mounted:
            return
        top = self.scroll_offset.y
        number = self._rows[top].number if top < len(self._rows) else self._lines.first
        self._rows.lay_out(self._wrap_cells(), self.level)
        self._size_rows()
        if self.follow:
            self._to_end()
        else:
            self.scroll_to(y=self._rows.index_of(number), animate=False, force=True)
        self.refresh()

    def _wrap_cells(self) -> int | None:
        # One cell is kept free for the vertical scrollbar, so that rows stay as it comes and goes.
        return self.size.width - 1 - self._prefix_cells() if self.wrap and self.size.width else None

    def _prefix_cells(self) -> int:
        return (TIME_CELLS if self.show_times else 0) + (RANK_CELLS if self.show_ranks else 0)

    def on_resize(self) -> None:
        # The size is known only now, and the end is elsewhere in another size.
        if self._rows.width != self._wrap_cells():
            self._lay_out()
        elif self.follow:
            self._to_end()

    def watch_wrap(self) -> None:
        self.scroll_x = 0
        self._lay_out()

    def watch_show_ranks(self) -> None:
        self._lay_out()

    def watch_show_times(self) -> None:
        self._lay_out()

    def watch_level(self) -> None:
        self._lay_out()
        self.post_message(self.LevelChanged(self))

    def __len__(self) -> int:
        return len(self._lines)

    def text(self) -> str:
        """All lines that are held, as plain text."""
        return "\n".join(line.text for line in self._lines)

    def watch_follow(self, follow: bool) -> None:
        if follow:
            self._to_end()
        self.post_message(self.FollowChanged(self, follow))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value < old_value and new_value < self.max_scroll_y and not self._shrank():
            self.follow = False
        elif new_value >= self.max_scroll_y > 0:
            self.follow = True

    def _shrank(self) -> bool:
        """Whether the view moved up only because there are fewer rows, or more room."""
        return len(self._rows) <= self.size.height

    # Search

    @property
    def query_text(self) -> str:
        return self._query

    def search(self, query: str) -> int:
        """Mark every line that holds ``query``; returns how many there are."""
        self._query = query
        self._found = None
        self.refresh()
        return len(self.hits())

    def hits(self) -> Sequence[int]:
        """Indices of the lines that hold the query and are shown."""
        hits = self._lines.hits(self._query)
        if self.level is LogLevel.ALL:
            return hits
        return [hit for hit in hits if self.level.shows(self._lines[hit])]

    def seek(self, direction: int) -> int | None:
        """Go to the next (1) or previous (-1) hit, around the ends. Returns its place among all."""
        hits = self.hits()
        if not hits:
            return None
        now = self._line_at(direction) if self._found is None else self._found - self._lines.first
        later = [i for i, line in enumerate(hits) if (line - now) * direction > 0]
        place = (later[0] if direction > 0 else later[-1]) if later else (direction - 1) // 2
        place %= len(hits)
        self._found = hits[place] + self._lines.first
        self.follow = False
        row = self._rows.index_of(self._found)
        self.scroll_to(y=max(0, row - self.size.height // 2), animate=False, force=True)
        self.refresh()
        return place

    def _line_at(self, direction: int) -> int:
        """The line from which a search begins: what is in view is searched first."""
        if not len(self._rows):
            return 0
        row = self.scroll_offset.y + (self.size.height - 1 if direction < 0 else 0)
        number = self._rows[min(row, len(self._rows) - 1)].number
        return number - self._lines.first - direction

    # Drawing

    def render_lines(self, crop: Region) -> list[Strip]:
        # Styles are looked up once a repaint, not for every line.
        self._pen = self.rich_style, line_styles(self.app)
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        base, paint = self._pen or (self.rich_style, line_styles(self.app))
        if not len(self._rows):
            note = self._empty_note() if y == (height - 1) // 2 else ""
            return _centred(note, width, paint, base)
        index = self.scroll_offset.y + y
        if index >= len(self._rows):
            return Strip.blank(width, base)
        row = self._rows[index]
        line = self._lines[row.number - self._lines.first]
        text = _styled(line, paint, self._query)[row.begin : row.end]
        prefix = self._prefix(line, paint) if row.begin == 0 else Text(" " * self._prefix_cells())
        if self._found == row.number:
            text.stylize(paint.selected)
            prefix.stylize(paint.selected)
        # Only the text is scrolled sideways: whose line it is stays in view.
        left, room = self.scroll_offset.x, max(0, width - prefix.cell_len)
        strips = (
            Strip(prefix.render(self.app.console, end="")),
            Strip(text.render(self.app.console, end="")).crop_extend(left, left + room, base),
        )
        return Strip.join(strips).adjust_cell_length(width, base).apply_style(base)

    def _empty_note(self) -> str:
        return f"no lines to show: {self.level.value}" if len(self._lines) else self.note

    def _prefix(self, line: LogLine, paint: LineStyles) -> Text:
        text = Text(no_wrap=True, end="")
        if self.show_times:
            text.append(_time_of_day(line.seen_at), paint.of(Tone.DIM))
        if self.show_ranks:
            ink = paint.title if line.rank is None else paint.series[line.rank % len(paint.series)]
            name = "" if line.rank is None else f"r{line.rank}"
            text.append(name.ljust(RANK_CELLS - 1) + " ", ink)
        return text


def _time_of_day(seen_at: float | None) -> str:
    if seen_at is None:
        return NA.rjust(TIME_CELLS - 1) + " "
    return time.strftime("%H:%M:%S ", time.localtime(seen_at))


def _centred(text: str, width: int, paint: LineStyles, base: Style) -> Strip:
    left = max(0, (width - cell_len(text)) // 2)
    strip = Strip([Segment(" " * left), Segment(text, paint.title)])
    return strip.adjust_cell_length(width).apply_style(base)


def _styled(line: LogLine, paint: LineStyles, query: str) -> Text:
    text = Text(shown_text(line), paint.of(line.tone), no_wrap=True, end="")
    for begin in occurrences(line.text, query):
        text.stylize(paint.match, begin, begin + len(query))
    if line.count > 1:
        text.stylize(paint.of(Tone.DIM), len(line.text))
    return text


class LogView(Vertical):
    """A log with a search line that appears with ``/``."""

    DEFAULT_CSS = """
    LogView { height: 1fr; width: 1fr; }
    LogView > #log-search { display: none; height: 1; }
    LogView.-searching > #log-search { display: block; }
    LogView #log-query { width: 1fr; border: none; height: 1; padding: 0 1; }
    LogView #log-hits { width: auto; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "find", id="log.find", tooltip="Search in the log"),
        Binding("n", "seek(1)", "next", show=False, id="log.next", tooltip="Next match"),
        Binding(
            "N,shift+n",
            "seek(-1)",
            "previous",
            show=False,
            id="log.previous",
            tooltip="Previous match",
        ),
        Binding("f", "follow", "follow", show=False, id="log.follow", tooltip=FOLLOW_TIP),
        Binding("w", "wrap", "wrap", show=False, id="log.wrap", tooltip=WRAP_TIP),
        Binding("L", "level", "level", show=False, id="log.level", tooltip=LEVEL_TIP),
        Binding("T", "times", "times", show=False, id="log.times", tooltip=TIMES_TIP),
        Binding(
            "escape",
            "leave",
            "close search",
            show=False,
            id="log.leave",
            tooltip="Close the search",
        ),
    ]

    def __init__(
        self,
        *,
        max_lines: int = MAX_LINES,
        id: str | None = None,  # noqa: A002 - Textual's name for it
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.lines = LogLines(max_lines=max_lines)

    def compose(self) -> ComposeResult:
        yield self.lines
        with Horizontal(id="log-search"):
            yield Input(placeholder="find", id="log-query", compact=True)
            yield Static("", id="log-hits", markup=False)

    def extend(self, lines: Iterable[LogLine]) -> None:
        self.lines.extend(lines)

    def set_lines(self, lines: Iterable[LogLine]) -> None:
        self.lines.set_lines(lines)

    @property
    def follow(self) -> bool:
        return self.lines.follow

    @follow.setter
    def follow(self, follow: bool) -> None:
        self.lines.follow = follow

    def action_find(self) -> None:
        self.add_class("-searching")
        self.query_one("#log-query", Input).focus()

    def action_follow(self) -> None:
        self.follow = not self.follow

    def action_wrap(self) -> None:
        self.lines.wrap = not self.lines.wrap

    def action_level(self) -> None:
        self.lines.level = self.lines.level.next()

    def action_times(self) -> None:
        self.lines.show_times = not self.lines.show_times

    def action_seek(self, direction: int) -> None:
        self._tell(self.lines.seek(direction))

    def action_leave(self) -> None:
        """Close the search, and forget what was searched for."""
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
        self._tell(None)

    @on(Input.Submitted, "#log-query")
    def _entered(self, event: Input.Submitted) -> None:
        """Enter goes to the last hit, and gives the keys back to the lines."""
        event.stop()
        self.lines.focus()
        self._tell(self.lines.seek(-1))

    def _tell(self, place: int | None) -> None:
        hits = len(self.lines.hits()) if self.lines.query_text else 0
        if not self.lines.query_text:
            text = ""
        elif place is None:
            text = f"{hits} found" if hits else "not found"
        else:
            text = f"{place + 1} of {hits}"
        self.query_one("#log-hits", Static).update(text)
