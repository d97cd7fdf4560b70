"""The screen of the command palette."""

from __future__ import annotations

from typing import Any

from textual.await_complete import AwaitComplete
from textual.command import CommandPalette
from textual.worker import Worker, WorkerState

from ltui.app.screens.dialog import uncover


class Palette(CommandPalette):
    """The palette, also for keys that arrive faster than it closes."""

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
