"""A panel with a list, and a filter above it that the key ``/`` opens."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.widgets import Input

from ltui.app.panels.panel import Panel


class FilterPanel(Panel):
    """A panel that lists what matches ``filter_text``."""

    LIST: ClassVar[str]
    """Selector of the widget with the list."""

    def fill_list(self) -> None:
        """List what matches the filter."""
        raise NotImplementedError

    @property
    def filter_text(self) -> str:
        return self.query_one(".filter", Input).value.strip()

    def open_filter(self) -> None:
        self.add_class("-filtering")
        self.query_one(".filter", Input).focus()

    def clear_filter(self) -> None:
        """List everything, and move the focus to the list."""
        self.remove_class("-filtering")
        self.query_one(".filter", Input).value = ""
        self.query_one(self.LIST).focus()

    @on(Input.Changed, ".filter")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.fill_list()

    @on(Input.Submitted, ".filter")
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.set_class(bool(self.filter_text), "-filtering")
        self.query_one(self.LIST).focus()
