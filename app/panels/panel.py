"""A framed part of a screen: its number and title on the left, a summary on the right."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on
from textual.containers import Vertical
from textual.events import Resize
from textual.markup import escape
from textual.message import Message
from textual.widgets import Input, Static


class LiveText(Static):
    """A text without markup. Only another number of lines changes the layout."""

    def __init__(self, *, id: str, wraps: bool = False) -> None:  # noqa: A002 - Textual's name for it
        """With ``wraps`` every new text changes the layout, because its lines may be wrapped."""
        super().__init__(id=id, markup=False)
        self._wraps = wraps
        self._shown: Text | None = None

    def show(self, text: Text) -> None:
        """Show ``text``."""
        before = self._shown
        if text != before:
            self._shown = text
            same_lines = before is not None and before.plain.count("\n") == text.plain.count("\n")
            self.update(text, layout=self._wraps or not same_lines)


class SettingChosen(Message):
    """The user changed a setting of ``user_config.SETTINGS``; None stands for its default."""

    def __init__(self, setting: str, value: Any) -> None:
        super().__init__()
        self.setting, self.value = setting, value


class Panel(Vertical):
    """A container with a frame, which is bright while the focus is inside."""

    def __init__(self, number: int | None, title: str, *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self.number = number
        self.set_titles(title)

    def set_titles(self, title: str, summary: str = "", legend: str = "") -> None:
        """Set the texts. They may contain text of a run, so they are never parsed as markup.

        ``legend`` follows the summary if there is room for both.
        """
        self.title, self.summary, self._legend = title, summary, legend
        self._write_titles()

    @on(Resize)
    def _write_titles(self) -> None:
        title = self.title
        left = escape(title if self.number is None else f"[{self.number}] {title}")
        explained = " · ".join(part for part in (self.summary, self._legend) if part)
        room = self.size.width - 4
        right = escape(explained if cell_len(explained) <= room else self.summary)
        if self.border_title != left:
            self.border_title = left
        if self.border_subtitle != right:
            self.border_subtitle = right


class FilterPanel(Panel):
    """A panel that lists what matches ``filter_text``."""

    LIST: ClassVar[str]
    """Selector of the widget with the list."""

    def fill_list(self) -> None:
        """List what matches the filter."""
        raise NotImplementedError

    @property
    def filter_text(self) -> str:
        return self.query_one(".filter", Input).value.strip()

    def open_filter(self) -> None:
        self.add_class("-filtering")
        self.query_one(".filter", Input).focus()

    def clear_filter(self) -> None:
        """List everything, and move the focus to the list."""
        self.remove_class("-filtering")
        self.query_one(".filter", Input).value = ""
        self.query_one(self.LIST).focus()

    @on(Input.Changed, ".filter")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.fill_list()

    @on(Input.Submitted, ".filter")
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.set_class(bool(self.filter_text), "-filtering")
        self.query_one(self.LIST).focus()
