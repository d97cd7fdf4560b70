"""The question where and in which format the metrics of runs are exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from ltui.app.panels.form_fields import Form, FormField
from ltui.app.runs.export_formats import EXPORT_FORMATS, FOLDER_FORMAT
from ltui.app.screens.dialog import ConfirmScreen, Dialog
from ltui.training.problem import Problem
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line

FORMAT, TARGET = "format", "file"


class ExportChoice(NamedTuple):
    """A format and a file, or a folder for event files."""

    form: str
    target: str


class ExportQuestion(Dialog[ExportChoice | None]):
    """Return the choice, or None. A file that exists is replaced only after a question."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "export_question",
        """
        enter  | submit        | export | Export
        escape | dismiss(None) | cancel | Export nothing
        """,
    )

    def __init__(self, runs: str, name: str, folder: Path) -> None:
        """``runs``: what the runs are called. ``name``: the proposed name, without a suffix.
        ``folder``: where a relative path is."""
        super().__init__()
        self._runs, self._stem, self._folder = runs, name, folder
        self._proposed = _file_name(name, next(iter(EXPORT_FORMATS)))

    def compose(self) -> ComposeResult:
        options = [(about, form) for form, about in EXPORT_FORMATS.items()]
        with Vertical(classes="dialog"):
            yield Static(Text(f"Export the metrics of {self._runs}", "bold"), id="question")
            with Form(id="fields"):
                yield FormField(FORMAT, options=options)
                yield FormField(TARGET, text=self._proposed, meaning="relative to this folder")
            yield Static("⏎ export   tab next   f1 help   esc cancel", id="answers")

    def on_mount(self) -> None:
        self._field(TARGET).query_one("Input").focus()

    def _field(self, key: str) -> FormField:
        return next(field for field in self.query(FormField) if field.key == key)

    def on_form_field_changed(self, event: Message) -> None:
        event.stop()
        target = self._field(TARGET)
        proposed = _file_name(self._stem, self._field(FORMAT).text)
        if target.text == self._proposed != proposed:
            self._proposed = proposed
            target.text = proposed
        self._field(TARGET).show_problems(())

    def on_form_field_entered(self, event: Message) -> None:
        event.stop()
        self.action_submit()

    def action_submit(self) -> None:
        form, text = self._field(FORMAT).text, self._field(TARGET).text.strip()
        path = self._folder / Path(text).expanduser()
        choice = ExportChoice(form, str(path))
        if problem := _problem(form, text, path):
            self.query_one(Form).show_problems([Problem(where=TARGET, what=problem)])
        elif form != FOLDER_FORMAT and path.exists():
            question = ConfirmScreen(
                f"{clean_line(str(path))} exists. Replace it?",
                yes="replace it",
                no="choose another name",
            )
            self.app.push_screen(question, partial(self._replace, choice))
        else:
            self.dismiss(choice)

    def _replace(self, choice: ExportChoice, yes: bool | None) -> None:
        if yes:
            self.dismiss(choice)


def _problem(form: str, text: str, path: Path) -> str | None:
    """Return why the metrics can't be written to ``path``."""
    if not text:
        return "a name is missing."
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}."
    if form == FOLDER_FORMAT:
        return "this is a file, and a folder is needed." if path.is_file() else None
    return "this is a folder." if path.is_dir() else None


def _file_name(name: str, form: str) -> str:
    return f"{name}-events" if form == FOLDER_FORMAT else f"{name}.{form}"
