"""The resolved configuration of a preset as text that can be edited, checked while it is typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static, TextArea

from ltui.app.screens.keys import bindings
from ltui.training.problem import Problem
from ltui.widgets.sanitise import clean_line

CHECK_AFTER_S = 0.3
SHOWN = 6


class YamlScreen(ModalScreen[str]):
    """Gives the text on ctrl+s, None where it was left as it was."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "yaml",
        """
        ctrl+s | take | take it  | Use this configuration for the next launch
        escape | drop | leave it | Back, without the changes
        """,
        priority=True,
    )

    def __init__(self, title: str, text: str, check: Callable[[str], Sequence[Problem]]) -> None:
        super().__init__()
        self._title, self._text, self._check = title, text, check

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide"):
            yield Static(Text(self._title, "bold"), id="question")
            yield TextArea(self._text, show_line_numbers=True, id="editor", soft_wrap=False)
            yield Static(id="yaml-problems", markup=False)
            yield Static(Text("ctrl+s take it    esc leave it as it was"), id="answers")

    def on_mount(self) -> None:
        self._timer = self.set_timer(0.01, self._look)
        self.query_one("#editor").focus()

    @on(TextArea.Changed)
    def _typed(self, event: TextArea.Changed) -> None:
        event.stop()
        self._timer.stop()
        self._timer = self.set_timer(CHECK_AFTER_S, self._look)

    def _look(self) -> bool:
        problems = self._check(self.query_one(TextArea).text)
        lines = [f"✗ {clean_line(str(p))}" for p in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"and {len(problems) - SHOWN} more")
        self.query_one("#yaml-problems", Static).update(Text("\n".join(lines), "bold"))
        return not problems

    def action_take(self) -> None:
        if self._look():
            self.dismiss(self.query_one(TextArea).text)

    def action_drop(self) -> None:
        self.dismiss(None)
