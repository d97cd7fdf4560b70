"""A framed part of a screen: its number and title on the left, a summary on the right."""

from __future__ import annotations

from textual.containers import Vertical
from textual.markup import escape


class Panel(Vertical):
    """A container with a frame, which is bright while the focus is inside."""

    def __init__(self, number: int | None, title: str, *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self.number = number
        self.set_titles(title)

    def set_titles(self, title: str, summary: str = "") -> None:
        """Set both texts. They may contain text of a run, so they are never parsed as markup."""
        self.title, self.summary = title, summary
        left, right = (
            escape(title if self.number is None else f"{self.number} {title}"),
            escape(summary),
        )
        if self.border_title != left:
            self.border_title = left
        if self.border_subtitle != right:
            self.border_subtitle = right
