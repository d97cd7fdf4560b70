"""The base of the screens that fill the terminal."""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.screen import Screen, ScreenResultType

from ltui.app.screens.dialog import uncover


class FullScreen(Screen[ScreenResultType]):
    """A screen that is not painted while another one hides it."""

    @property
    def is_current(self) -> bool:
        """Return whether the user sees this screen, perhaps through the ones above it.

        Textual takes every screen right below the top one as visible. It would then paint the whole
        terminal again whenever something changes on the hidden screen.
        """
        if not super().is_current:
            return False
        stack = self.app.screen_stack
        above = stack[stack.index(self) + 1 :]
        return all(screen.styles.background.a < 1 for screen in above)

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        return super().dismiss(result) if uncover(self) else AwaitComplete()
