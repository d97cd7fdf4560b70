"""A list of options that may be replaced while a click on one of them is on its way."""

from __future__ import annotations

from typing import Literal

from textual import events
from textual.widgets import OptionList


class ChangingList(OptionList):
    """A list that ignores a click on an option that is gone, and pages while it has no room."""

    async def _on_click(self, event: events.Click) -> None:
        # Textual calls the method of the base class afterwards, unless that is prevented.
        option = event.style.meta.get("option")
        if option is not None and option >= self.option_count:
            event.prevent_default()

    def _move_page(self, direction: Literal[-1, 1]) -> None:
        # Without room no option has a line.
        if self.scrollable_content_region:
            super()._move_page(direction)
