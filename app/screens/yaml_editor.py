"""An editor for the configuration of a preset, which is checked while the user types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static, TextArea

from ltui.app.screens.dialog import ConfirmScreen, Dialog, do_after
from ltui.training.problem import Problem
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line

CHECK_AFTER_S = 0.3
"""Seconds after the last change until the text is checked."""
MAX_PROBLEMS = 6
"""Maximum number of problems to show."""
HINT = "ctrl+s: use this   ctrl+z: undo   ctrl+y: redo   f1: help   Esc: cancel"


class YamlEditor(TextArea):
    """A text area with the usual keys to go to its start and its end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+home", "document(0)", "start", show=False, id="editor.start"),
        Binding("ctrl+end", "document(1)", "end", show=False, id="editor.end"),
    ]

    def action_document(self, end: int) -> None:
        self.move_cursor(self.document.end if end else (0, 0))


class YamlScreen(Dialog[str]):
    """Return the text after ctrl+s, or None if it was not changed or was discarded."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "yaml",
        """
        ctrl+s | take | use this | Use this configuration for the next launch
        escape | drop | cancel   | Close the editor; asks before changes are discarded
        """,
        priority=True,
    )

    def __init__(self, title: str, text: str, check: Callable[[str], Sequence[Problem]]) -> None:
        super().__init__()
        self._title, self._text, self._check = title, text, check

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide"):
            yield Static(Text(self._title, "bold"), id="question")
            yield YamlEditor(self._text, show_line_numbers=True, id="editor", soft_wrap=False)
            yield Static(id="yaml-problems", markup=False)
            yield Static(Text(HINT), id="answers")

    def on_mount(self) -> None:
        self._timer = self.set_timer(0.01, self._show_problems)
        self.query_one("#editor").focus()

    @on(TextArea.Changed)
    def _typed(self, event: TextArea.Changed) -> None:
        event.stop()
        self._timer.stop()
        self._timer = self.set_timer(CHECK_AFTER_S, self._show_problems)

    def _show_problems(self) -> bool:
        """Check the text and show its problems; return True if there are none."""
        problems = self._check(self.query_one(TextArea).text)
        lines = [f"✗ {clean_line(str(p))}" for p in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
        self.query_one("#yaml-problems", Static).update(Text("\n".join(lines), "bold"))
        return not problems

    def action_take(self) -> None:
        if self._show_problems():
            self.dismiss(self.query_one(TextArea).text)

    def action_drop(self) -> None:
        if self.query_one(TextArea).text == self._text:
            self.dismiss(None)
            return
        text = "Discard the changes to this configuration?"
        question = ConfirmScreen(text, yes="discard them", no="keep editing")
        do_after(self, question, lambda: self.dismiss(None))
