"""Tab and shift+tab on a screen that shows one panel at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.widget import Widget

from ltui.app.screens.full_screen import FullScreen


class TabbedScreen(FullScreen[Any]):
    """A screen of panels. Where only one of them is shown, Tab goes through all of them."""

    def tabs(self) -> tuple[Sequence[str], str]:
        """Return the names of all panels and the one that is shown; without tabs, no names."""
        raise NotImplementedError

    def action_panel(self, name: str) -> None:
        """Show a panel and move the focus into it."""
        raise NotImplementedError

    def focus_next(self, selector: str | type[Widget] = "*") -> Widget | None:
        """Move the focus to the next widget; from the last one of a tab, to the next tab."""
        return self.focused if self._turned_tab(1) else super().focus_next(selector)

    def focus_previous(self, selector: str | type[Widget] = "*") -> Widget | None:
        """Move the focus to the widget before; from the first one of a tab, to the tab before."""
        return self.focused if self._turned_tab(-1) else super().focus_previous(selector)

    def _turned_tab(self, step: int) -> bool:
        """Show the tab beside, unless the shown one has another widget for the focus."""
        names, shown = self.tabs()
        chain = self.focus_chain
        last = chain[-1 if step > 0 else 0] if chain else None
        if not names or (self.focused in chain and self.focused is not last):
            return False
        self.action_panel(names[(names.index(shown) + step) % len(names)])
        return True
