"""A text that is drawn with every frame, but repainted only if it changed."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static


class LiveText(Static):
    """A text without markup. Only another number of lines changes the layout."""

    def __init__(self, *, id: str, wraps: bool = False) -> None:  # noqa: A002 - Textual's name for it
        """With ``wraps`` every new text changes the layout, because its lines may be wrapped."""
        super().__init__(id=id, markup=False)
        self._wraps = wraps
        self._shown: Text | None = None

    def show(self, text: Text) -> None:
        """Show ``text``."""
        before = self._shown
        if text != before:
            self._shown = text
            same_lines = before is not None and before.plain.count("\n") == text.plain.count("\n")
            self.update(text, layout=self._wraps or not same_lines)
