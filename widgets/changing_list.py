"""A list of options that may be replaced while a click on one of them is on its way."""

from __future__ import annotations

from textual import events
from textual.widgets import OptionList


class ChangingList(OptionList):
    """A list that ignores a click on an option that is gone."""

    async def _on_click(self, event: events.Click) -> None:
        option = event.style.meta.get("option")
        if option is None or option < self.option_count:
            await super()._on_click(event)
