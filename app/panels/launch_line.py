"""The line below a form that describes the run, and starts it."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Static


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

    class Pressed(Message):
        """The line was clicked, or Enter was pressed on it."""

    def show(self, description: str, *, ready: bool, name: str = "Launch") -> None:
        """Show the button ``name``, bright if it is ``ready``, and the description after it."""
        style = "bold reverse" if ready else "dim"
        self.update(Text.assemble((f" ⏎ {name} ", style), "  ", description))

    def show_error(self, sentence: str) -> None:
        """Show what prevents a launch. Without the button, more of it fits."""
        self.update(Text(f"✗ {sentence}", "bold"))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Pressed())

    def action_press(self) -> None:
        self.post_message(self.Pressed())
