"""The footer: the keys that can be used now, as many as fit without cutting a word."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace
from rich.style import Style
from rich.text import Text
from textual.app import ActionError, RenderResult
from textual.events import Event
from textual.widget import Widget

from ltui.app.keys.listed_keys import own_key, refusal_of

READONLY_BADGE = " READ-ONLY "
"""Shown on every screen with ``--readonly``."""


class KeyHint(Struct, frozen=True):
    """One key of the footer. A click on it runs ``action``."""

    key: str
    words: str
    action: str
    keep: bool = False
    """Shown however narrow the terminal is."""

    @property
    def width(self) -> int:
        return len(self.key) + 1 + len(self.words)


FIELD_HELP_HINT = KeyHint("f1", "help", "app.help")
"""The help while a text field has the focus, which takes a question mark as input."""


def fitting(hints: Sequence[KeyHint], width: int, gap: int = 2) -> list[KeyHint]:
    """Return the hints that fit into ``width`` cells, in order. Hints to keep are placed first."""
    free_width = width - 2
    chosen: set[int] = set()
    for must_keep in (True, False):
        for i, hint in enumerate(hints):
            if hint.keep is not must_keep:
                continue
            need = hint.width + (gap if chosen else 0)
            if need > free_width:
                break
            chosen.add(i)
            free_width -= need
    return [hints[i] for i in sorted(chosen)]


class KeyFooter(Widget):
    """One line of keys at the bottom of a screen."""

    DEFAULT_CSS = """
    KeyFooter {
        dock: bottom; height: 1; background: $footer-background; color: $footer-foreground;
        link-style: none; link-color: $footer-foreground; link-background: $footer-background;
        link-style-hover: reverse; link-color-hover: $footer-foreground;
        link-background-hover: $footer-background;
    }
    """
    can_focus = False

    def __init__(self, hints: Sequence[KeyHint] = (), *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._hints = tuple(hints)

    def show(self, hints: Sequence[KeyHint]) -> None:
        if tuple(hints) != self._hints:
            self._hints = tuple(hints)
            self.refresh()

    async def broker_event(self, event_name: str, event: Event) -> bool:
        try:
            return await super().broker_event(event_name, event)
        except ActionError:
            if self.app.focused is not None:
                raise
            return False  # The focus has gone since the keys were drawn.

    def render(self) -> RenderResult:
        line = Text(" ", no_wrap=True, end="")
        if getattr(self.app, "readonly", False):
            # Reverse video is visible without colours as well.
            line.append(READONLY_BADGE, Style(reverse=True, bold=True))
            line.append("  ")
        screen = self.screen
        usable = [
            replace(hint, key=own_key(screen, hint.action) or hint.key)
            for hint in self._hints
            if refusal_of(screen, hint.action) is None
        ]
        for i, hint in enumerate(fitting(usable, self.size.width - len(line) + 1)):
            line.append("  " if i else "")
            start = len(line)
            line.append(hint.key, Style(bold=True))
            line.append(f" {hint.words}")
            line.apply_meta({"@click": hint.action}, start, len(line))
        return line
