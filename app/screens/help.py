"""Every key of the screen below, from its bindings: nothing is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from ltui.app.screens.keys import bindings

_NAMES = {
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "minus": "-",
    "slash": "/",
    "equals_sign": "=",
}


class HelpScreen(ModalScreen[None]):
    """A list of keys over the screen it explains."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "help",
        """
        escape,q,question_mark,enter | close | close | Back
        """,
    )

    def __init__(self, lines: Sequence[tuple[str, str]], about: str) -> None:
        super().__init__()
        self._lines, self._about = lines, about

    @classmethod
    def of(cls, screen: Screen[object]) -> HelpScreen:
        """Help for ``screen``: bindings of the same action stand in one line."""
        by_action: dict[str, tuple[list[str], str]] = {}
        for key, active in screen.active_bindings.items():
            binding = active.binding
            if not binding.id or not binding.description or not active.enabled:
                continue
            words = binding.tooltip or binding.description
            by_action.setdefault(binding.id, ([], words))[0].append(_NAMES.get(key, key))
        own = str(getattr(screen, "SCOPE", ""))
        ordered = sorted(by_action.items(), key=lambda item: not item[0].startswith(f"{own}."))
        lines = [(" ".join(keys), words) for _, (keys, words) in ordered]
        return cls(lines, str(getattr(screen, "ABOUT", "")))

    def compose(self) -> ComposeResult:
        width = max((len(keys) for keys, _ in self._lines), default=0)
        text = Text()
        for keys, words in self._lines:
            text.append(keys.rjust(width), "bold")
            text.append(f"   {words}\n")
        with VerticalScroll(classes="dialog -help"):
            if self._about:
                yield Static(Text(self._about), classes="about")
            yield Static(text)
            yield Static(Text("esc back    ctrl+p the same as a palette"), id="answers")

    def action_close(self) -> None:
        self.dismiss(None)
