"""The base of all dialogs, and how a screen closes itself alone.

Textual removes the top screen, whichever it is: of two keys that close a dialog, the second one
would close the screen below, and the last screen cannot be closed at all.
"""

from __future__ import annotations

from typing import Any

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen, Screen, ScreenResultType


def uncover(screen: Screen[Any]) -> bool:
    """Close what is above a screen. Return False if the screen itself is closed already."""
    stack = screen.app.screen_stack
    if screen not in stack[1:]:
        return False
    for _ in stack[stack.index(screen) + 1 :]:
        screen.app.pop_screen()
    return True


class Dialog(ModalScreen[ScreenResultType]):
    """A dialog above a screen."""

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        return super().dismiss(result) if uncover(self) else AwaitComplete()
