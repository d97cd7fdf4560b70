"""The screen of the command palette."""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.command import CommandPalette

from ltui.app.screens.dialog import uncover


class Palette(CommandPalette):
    """The palette. Keys that arrive faster than it closes close nothing else."""

    def dismiss(self, result: None = None) -> AwaitComplete:
        return super().dismiss(result) if uncover(self) else AwaitComplete()
