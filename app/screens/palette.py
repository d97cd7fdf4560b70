"""The screen of the command palette."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.command import CommandList, CommandPalette
from textual.worker import Worker, WorkerState

from ltui.app.screens.dialog import uncover
from ltui.widgets.changing_list import ChangingList


class Commands(CommandList, ChangingList, can_focus=False):
    """The commands that were found, which the next search replaces."""


class Palette(CommandPalette):
    """The palette, also for keys that arrive faster than it closes."""

    def compose(self) -> ComposeResult:
        for widget in super().compose():
            yield Commands() if type(widget) is CommandList else widget

    def dismiss(self, result: None = None) -> AwaitComplete:
        return super().dismiss(result) if uncover(self) else AwaitComplete()

    def run_worker(self, *arguments: Any, **options: Any) -> Worker[Any]:
        """Start a search. One that began while the palette was closing fails without its list."""
        return super().run_worker(*arguments, **{**options, "exit_on_error": False})

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Report the error of a search while the palette is open."""
        error = event.worker.error
        open_still = self in self.app.screen_stack
        if event.state is WorkerState.ERROR and isinstance(error, Exception) and open_still:
            raise error
