"""A framed part of a screen: its number and title on the left, a summary on the right.

With it the parts that several screens have: a filter, the line of tabs, the line that launches.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.app import RenderResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.markup import escape
from textual.message import Message
from textual.widget import Widget
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


@dataclass
class SettingChosen(Message):
    """The user changed a setting of ``user_config.SETTINGS``; None stands for its default."""

    setting: str
    value: Any


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

    @on(events.Resize)
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


def panel_around(widget: Widget | None, names: Container[str]) -> str | None:
    """Return the name of the panel, one of ``names``, in which a widget is."""
    above = [] if widget is None else widget.ancestors_with_self
    panels = (node.id for node in above if isinstance(node, Panel) and node.id is not None)
    return next((name for name in panels if name in names), None)


def focus_in(panel: Widget, *, with_filter: bool = True) -> bool:
    """Move the focus to the first widget of a panel that can take it, if there is one."""
    for widget in panel.query("*"):
        if widget.focusable and widget.display and (with_filter or not widget.has_class("filter")):
            widget.focus()
            return True
    return False


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


class TabBar(Widget):
    """A line such as ``1 loss  2 throughput [3 ranks]``. A click shows the panel."""

    DEFAULT_CSS = """
    TabBar { height: 1; link-style: none; link-style-hover: bold; }
    """
    can_focus = False

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self._tabs: tuple[tuple[int, str, str], ...] = ()
        self._chosen = ""

    def show(self, tabs: Sequence[tuple[int, str, str]], chosen: str) -> None:
        """Show ``tabs`` (number, panel name, title), and mark the chosen panel."""
        if (tuple(tabs), chosen) != (self._tabs, self._chosen):
            self._tabs, self._chosen = tuple(tabs), chosen
            self.refresh()

    def render(self) -> RenderResult:
        line = Text(" ", no_wrap=True, end="")
        labels = [f"{number} {title}" for number, _, title in self._tabs]
        # Three blanks between two labels if they fit, otherwise one.
        pad = " " if sum(len(label) + 3 for label in labels) <= self.size.width else ""
        for (_, panel, _), label in zip(self._tabs, labels, strict=True):
            start = len(line)
            # Reverse video is visible without colour as well.
            style = Style(reverse=True, bold=True) if panel == self._chosen else Style()
            line.append(f"{pad}{label}{pad}", style)
            line.apply_meta({"@click": f"screen.panel('{panel}')"}, start, len(line))
            line.append(" ")
        return line


class Submitted(Message):
    """Enter was pressed in a field of a form, or the line that launches was pressed."""


class LaunchLine(Static, can_focus=True):
    """A button to launch, followed by a description of the run."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "enter",
            "press",
            "launch",
            show=False,
            id="launch_line.press",
            tooltip="On the last line of a form: start the run",
        ),
    ]

    def show(self, description: str, *, ready: bool, name: str = "Launch") -> None:
        """Show the button ``name``, bright if it is ``ready``, and the description after it."""
        style = "bold reverse" if ready else "dim"
        self.update(Text.assemble((f" ⏎ {name} ", style), "  ", description))

    def show_error(self, sentence: str) -> None:
        """Show what prevents a launch. Without the button, more of it fits."""
        self.update(Text(f"✗ {sentence}", "bold"))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(Submitted())

    def action_press(self) -> None:
        self.post_message(Submitted())
