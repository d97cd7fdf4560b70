"""The questions about runs: their name, tags, group and note, and where to export their metrics.

With them what the commands for marked runs say and undo. The first frame needs none of this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from msgspec.structs import replace
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static

from ltui.app.command_output import EXPORT_FORMATS, FOLDER_FORMAT
from ltui.app.panels.form_fields import FieldHint, Form, FormField
from ltui.app.panels.panel import Submitted
from ltui.app.runs.label_changes import LabelChange, Outcome, for_each, undo, what_changed
from ltui.app.runs.run_entry import RunEntry
from ltui.app.screens.dialog import ConfirmScreen, Dialog, do_after
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_labels import (
    RunLabels,
    checked_group,
    checked_name,
    checked_note,
    checked_tags,
    with_tags,
)
from ltui.training.store.find_run import find_deleted, name_note, restore
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir, list_runs
from ltui.widgets.formats import size
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line

Change = Callable[[RunLabels], RunLabels]
"""Returns the new labels of a run."""
HINTS = {
    "name": "Any characters. An empty field restores the name of the id.",
    "tags": "baseline,v2 adds two tags; -draft removes one.",
    "group": "A run is in one group. An empty field takes it out of its group, after a question.",
    "note": "One line of text. An empty field removes the note, after a question.",
}
UNCHANGED = "several values; unchanged"
REMOVE = "-"
"""The text that removes the different groups or notes of several runs."""


class LabelQuestion(Dialog[Change | None]):
    """Return what changes the labels of a run, or None."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "label_question",
        """
        escape | dismiss(None) | cancel | Change nothing
        """,
    )

    def __init__(self, kind: str, runs: str, labels: Sequence[RunLabels], used: set[str]) -> None:
        """``kind``: a key of ``HINTS``. ``runs``: what the runs are called. ``labels``: those of
        the runs. ``used``: groups to complete a text with."""
        super().__init__()
        self._kind, self._runs, self._labels, self._used = kind, runs, labels, used

    def compose(self) -> ComposeResult:
        tags = sorted({tag for labels in self._labels for tag in labels.tags})
        about = HINTS[self._kind]
        if self._kind == "tags" and tags:
            about += f" Now: {', '.join(tags)}."
        if self._are_different:
            about = f"An empty field changes nothing; {REMOVE} removes every {self._kind}."
        title = f"{self._kind.capitalize()} of {self._runs}"
        with Vertical(classes="dialog"):
            yield Static(Text(title, "bold"), id="question")
            yield Static(Text(about), classes="about")
            yield Input(
                self._common(),
                placeholder=UNCHANGED if self._are_different else "",
                suggester=SuggestFromList(sorted(self._used)) if self._used else None,
                compact=True,
            )
            yield Static(id="problem", markup=False)
            yield Static("⏎ change   f1 help   esc cancel", id="answers")

    def on_mount(self) -> None:
        self.query_one("#problem").display = False

    def _values(self) -> set[str]:
        """Return the different groups or notes of the runs, the empty one included."""
        return {"" if self._kind == "tags" else getattr(one, self._kind) for one in self._labels}

    @property
    def _are_different(self) -> bool:
        return len(self._values()) > 1

    def _common(self) -> str:
        """Return the group or note that all of the runs have."""
        return "" if self._are_different else self._values().pop()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value.strip()
        if self._kind != "tags" and text == self._common():
            self.dismiss(None)
            return
        if self._are_different and text == REMOVE:
            text = ""
        try:
            change = label_change(self._kind, text)
        except ProblemError as error:
            problem = self.query_one("#problem", Static)
            problem.update(Text(f"✗ {clean_line(str(error))}"))
            problem.display = True
        else:
            self._ask(change)

    def _ask(self, change: Change | None) -> None:
        """Ask before something is removed from a run, and close the dialog."""
        losing = 0 if change is None else sum(_loses(one, change(one)) for one in self._labels)
        # A tag is named to remove it, so that is asked only for several runs.
        if not losing or (self._kind == "tags" and losing == 1):
            self.dismiss(change)
            return
        they = self._runs if losing == len(self._labels) else f"{losing} of {self._runs}"
        what = "these tags" if self._kind == "tags" else f"the {self._kind}"
        question = ConfirmScreen(f"Remove {what} of {they}?", yes="remove", no="keep")
        do_after(self, question, lambda: self.dismiss(change))


def _loses(before: RunLabels, after: RunLabels) -> bool:
    """Return whether a run loses a tag, its group or its note."""
    texts = any(getattr(before, k) and not getattr(after, k) for k in ("group", "note"))
    return texts or not set(before.tags) <= set(after.tags)


def label_change(kind: str, text: str) -> Change | None:
    """Return what a typed text changes; None if nothing. Raises ``ProblemError``."""
    if kind == "name":
        name = checked_name(text, kind)
        return lambda labels: replace(labels, name=name)
    if kind == "group":
        group = checked_group(text, kind)
        return lambda labels: replace(labels, group=group)
    if kind == "note":
        note = checked_note(text, kind)
        return lambda labels: replace(labels, note=note)
    words = re.split(r"[,\s]+", text.strip())
    removed = checked_tags((word[1:] for word in words if word.startswith("-")), kind)
    added = checked_tags((w.removeprefix("+") for w in words if not w.startswith("-")), kind)
    if not added and not removed:
        return None
    return lambda labels: replace(labels, tags=with_tags(labels, added, removed, kind))


MOST_NAMES = 5
"""Number of runs that a question names, and the maximum number of those left out."""
FORMAT, TARGET = "format", "file"


class ExportChoice(NamedTuple):
    """A format and a file, or a folder for event files."""

    form: str
    target: str


class ExportQuestion(Dialog[ExportChoice | None]):
    """Return the choice, or None. A file that exists is replaced only after a question."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-roomy")]  # noqa: RUF012

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
            yield FieldHint()
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
        self.query_one(FieldHint).show(self.focused)

    @on(Submitted)
    def _form_submitted(self, event: Submitted) -> None:
        event.stop()
        self.action_submit()

    def action_submit(self) -> None:
        form, text = self._field(FORMAT).text, self._field(TARGET).text.strip()
        path = self._folder / Path(text).expanduser()
        choice = ExportChoice(form, str(path))
        if problem := _problem(form, text, path):
            self.query_one(Form).show_problems([Problem(where=TARGET, what=problem)])
            self.query_one(FieldHint).show(self.focused)
        elif form != FOLDER_FORMAT and path.exists():
            question = ConfirmScreen(
                f"{clean_line(str(path))} exists. Replace it?",
                yes="replace it",
                no="choose another name",
            )
            do_after(self, question, lambda: self.dismiss(choice))
        else:
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


def current_labels(entries: Sequence[RunEntry]) -> list[RunLabels]:
    """Return the labels as they are now. The list knows those of a moment ago, and a tag that was
    added since would be removed without a question."""
    return [read_labels(entry.run_dir) for entry in entries]


def delete_question(ended: Sequence[RunEntry]) -> str:
    """Return the question that names the runs, and what can be undone for how long."""
    one = len(ended) == 1
    question = f"Delete {ended[0].name if one else f'{len(ended)} runs'}?{names_below(ended)}"
    if starred := sum(entry.labels.star for entry in ended):
        question += "\nIt has a star." if one else f"\n{starred} of them with a star."
    question += f"\n{'It' if one else 'They'} can be restored for 7 days (ltui restore)."
    if all(entry.size_bytes is not None for entry in ended):
        total = size(sum(entry.size_bytes or 0.0 for entry in ended))
        question += f" Then {total} are freed."
    return question


def names_below(entries: Sequence[RunEntry]) -> str:
    """Return a line with the names of several runs; empty for one, which the question names."""
    names = [entry.name for entry in entries[:MOST_NAMES]]
    return f"\n{with_more(names, len(entries))}" if len(entries) > 1 else ""


def with_more(texts: Sequence[str], count: int) -> str:
    """Return the texts, and how many more there are."""
    more = count - len(texts)
    return f"{', '.join(texts)}{f' and {more} more' if more > 0 else ''}"


def new_name_note(changes: Sequence[LabelChange]) -> str:
    """Return what to say if the new name of a run does not name it alone."""
    notes = (name_note(list_runs(c.run_dir.home), c.run_dir, c.after.name) for c in changes)
    return clean_line(" ".join(filter(None, notes)))


def undo_labels(changes: Sequence[LabelChange]) -> tuple[Outcome, str]:
    """Undo changes of labels. Return how it went, and in words what was undone."""
    outcome, text = undo(changes), f"Undid: {what_changed(changes)}"
    return outcome, f"{text}, for {{}}" if outcome.failed else text


def restore_runs(home: Path, run_ids: Sequence[str]) -> tuple[Outcome, str]:
    """Move deleted runs from the bin back to the list."""
    run_dirs = [RunDir(home / "runs" / run_id) for run_id in run_ids]
    return for_each(run_dirs, lambda run: restore(find_deleted(home, run.id))), "Restored {}"
