"""Lines of a log: bounded, following its end, with search. Shows text as it is, never as markup."""

from __future__ import annotations

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

from ltui.widgets.log_lines import Lines, occurrences
from ltui.widgets.palette import Paint, paint_of
from ltui.widgets.shapes import LogLine, Tone

MAX_LINES = 5000


class LogLines(ScrollView, can_focus=True):
    """The lines themselves. ``LogView`` adds the search line below them."""

    DEFAULT_CSS = """
    LogLines { height: 1fr; width: 1fr; scrollbar-size: 1 1; }
    """

    follow: reactive[bool] = reactive(True, repaint=False)
    """Stay at the end as lines arrive."""
    show_ranks: reactive[bool] = reactive(True)
    note: reactive[str] = reactive("nothing written yet")

    class FollowChanged(Message):
        def __init__(self, lines: LogLines, follow: bool) -> None:
            super().__init__()
            self.lines = lines
            self.follow = follow

        @property
        def control(self) -> LogLines:
            return self.lines

    def __init__(self, *, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._lines = Lines(max_lines)
        self._widest = 0
        self._query = ""
        self._pen: tuple[Style, Paint] | None = None
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
        dropped = self._lines.extend(new)
        extra = len(_prefix(LogLine(rank=0, text=""), True)) + 8
        self._widest = max(self._widest, *(cell_len(n.text) + extra for n in new), 0)
        self.virtual_size = Size(self._widest, len(self._lines))
        if self.follow:
            self.scroll_end(animate=False, immediate=True, x_axis=False)
        elif dropped:
            # The reader's place moves up with the text.
            self.scroll_to(y=max(0, self.scroll_y - dropped), animate=False)
        self.refresh()

    def __len__(self) -> int:
        return len(self._lines)

    def text(self) -> str:
        """All lines that are held, as plain text."""
        return "\n".join(line.text for line in self._lines)

    def watch_follow(self, follow: bool) -> None:
        if follow:
            self.scroll_end(animate=False, x_axis=False)
        self.post_message(self.FollowChanged(self, follow))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value < old_value and new_value < self.max_scroll_y and not self._shrank():
            self.follow = False
        elif new_value >= self.max_scroll_y > 0:
            self.follow = True

    def _shrank(self) -> bool:
        """Whether the view moved up only because there are fewer lines, or more room."""
        return len(self._lines) <= self.size.height

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
        return self._lines.hits(self._query)

    def seek(self, direction: int) -> int | None:
        """Go to the next (1) or previous (-1) hit, around the ends. Returns its place among all."""
        hits = self.hits()
        if not hits:
            return None
        if self._found is None:
            bottom = self.scroll_offset.y + self.size.height - 1
            now = bottom + 1 if direction < 0 else self.scroll_offset.y - 1
        else:
            now = self._found - self._lines.first
        later = [i for i, line in enumerate(hits) if (line - now) * direction > 0]
        place = (later[0] if direction > 0 else later[-1]) if later else (direction - 1) // 2
        place %= len(hits)
        self._found = hits[place] + self._lines.first
        self.follow = False
        self.scroll_to(y=max(0, hits[place] - self.size.height // 2), animate=False)
        self.refresh()
        return place

    # Drawing

    def render_lines(self, crop: Region) -> list[Strip]:
        # Styles are looked up once a repaint, not for every line.
        self._pen = self.rich_style, paint_of(self.app)
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        base, paint = self._pen or (self.rich_style, paint_of(self.app))
        if not len(self._lines):
            return _centred(self.note if y == (height - 1) // 2 else "", width, paint, base)
        index = self.scroll_offset.y + y
        if index >= len(self._lines):
            return Strip.blank(width, base)
        line = self._lines[index]
        found = self._found is not None and self._found - self._lines.first == index
        text = _styled(line, paint, self._query, self.show_ranks, found)
        left = self.scroll_offset.x
        strip = Strip(text.render(self.app.console, end="")).crop_extend(left, left + width, base)
        return strip.apply_style(base)


def _centred(text: str, width: int, paint: Paint, base: Style) -> Strip:
    left = max(0, (width - cell_len(text)) // 2)
    strip = Strip([Segment(" " * left), Segment(text, paint.title)])
    return strip.adjust_cell_length(width).apply_style(base)


def _prefix(line: LogLine, show_ranks: bool) -> str:
    if not show_ranks:
        return ""
    return "     " if line.rank is None else f"r{line.rank}".ljust(4) + " "


def _styled(line: LogLine, paint: Paint, query: str, show_ranks: bool, found: bool) -> Text:
    text = Text(no_wrap=True, end="")
    ink = paint.title if line.rank is None else paint.series[line.rank % len(paint.series)]
    text.append(_prefix(line, show_ranks), ink)
    start = len(text)
    text.append(line.text, paint.of(line.tone))
    for begin in occurrences(line.text, query):
        text.stylize(paint.match, start + begin, start + begin + len(query))
    if line.count > 1:
        text.append(f"  ×{line.count}", paint.of(Tone.DIM))
    if found:
        text.stylize(paint.selected)
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
        Binding("n", "seek(1)", "next", show=False, id="log.next"),
        Binding("N,shift+n", "seek(-1)", "previous", show=False, id="log.previous"),
        Binding("f", "follow", "follow", show=False, id="log.follow"),
        Binding("escape", "leave", "leave search", show=False, id="log.leave"),
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
