"""The line below a form that starts a run, and says first what would start."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Static


class LaunchLine(Static, can_focus=True):
    """The line that launches, and says what a launch would start."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "press", "launch", show=False, id="launch_line.press"),
    ]

    class Pressed(Message):
        """A click, or Enter while the line has the focus."""

    def show(self, words: str, *, ready: bool, name: str = "Launch") -> None:
        """Show ``words`` beside the button ``name``."""
        style = "bold reverse" if ready else "dim"
        self.update(Text.assemble((f" ⏎ {name} ", style), "  ", words))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.action_press()

    def action_press(self) -> None:
        self.post_message(self.Pressed())
