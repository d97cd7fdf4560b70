"""A framed part of a screen: a number, a title on the left, figures on the right."""

from __future__ import annotations

from textual.containers import Vertical
from textual.markup import escape


class Panel(Vertical):
    """Frames one widget or a few; the frame is bright while the focus is inside."""

    def __init__(self, number: int | None, title: str, *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self.number, self.title = number, title
        self.set_titles(title)

    def set_titles(self, title: str, figures: str = "") -> None:
        """Both texts may hold what a run wrote: they are never parsed."""
        left, right = (
            escape(title if self.number is None else f"{self.number} {title}"),
            escape(figures),
        )
        if self.border_title != left:
            self.border_title = left
        if self.border_subtitle != right:
            self.border_subtitle = right
