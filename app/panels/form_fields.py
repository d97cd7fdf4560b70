"""The fields of a form: a label, an input, and a note with its problem or its meaning."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Select, Static

from ltui.training.config.ltui_section import Knob
from ltui.training.config.preset_form import START_FROM, field_text
from ltui.training.problem import Problem
from ltui.widgets.sanitise import clean_line, clean_name


class FormField(Horizontal):
    """One field. It does not check its text: the screen does and calls ``show_problems``."""

    class Changed(Message):
        """The text of the field changed."""

    class Entered(Message):
        """Enter was pressed in the field."""

    def __init__(self, key: str, label: str, text: str, *, default: str | None = None) -> None:
        """``key`` is the place that problems name. Texts other than ``default`` are marked."""
        super().__init__()
        self.key, self.label = key, label
        self._first, self._default = text, default
        self._last = text
        self._control: Widget | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text(clean_name(self.label)), classes="label")
        self._control = self._make_control()
        yield self._control
        yield Static(self._note(), classes="field-note", markup=False)

    def on_mount(self) -> None:
        self.set_class(self.changed, "-changed")

    def _make_control(self) -> Widget:
        return Input(self._first, compact=True, select_on_focus=False)

    @property
    def text(self) -> str:
        control = self._control
        if isinstance(control, (Input, Select)):
            return str(control.value)
        return self._first

    @property
    def changed(self) -> bool:
        """True if the text differs from the default."""
        return self._default is not None and self.text.strip() != self._default

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show the problems in the note; without problems, the meaning of the field."""
        self.set_class(bool(problems), "-wrong")
        self.query_one(".field-note", Static).update(self._note(problems))

    def _note(self, problems: Sequence[Problem] = ()) -> Text:
        if problems:
            sentences = " ".join(_sentence(p) for p in problems)
            return Text(f"✗ {clean_line(sentences)}", "bold")
        parts = [f"was {self._default or 'empty'}"] if self.changed else []
        return Text(clean_line(" · ".join([*parts, *self.meaning()])))

    def meaning(self) -> list[str]:
        """Return what the field is for, in short phrases."""
        return []

    @on(Input.Changed)
    @on(Select.Changed)
    def _control_changed(self, event: Message) -> None:
        event.stop()
        if self.text != self._last:
            self._last = self.text
            self.set_class(self.changed, "-changed")
            self.post_message(self.Changed())

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Entered())


class KnobField(FormField):
    """A field for one key of the configuration."""

    def __init__(self, knob: Knob, text: str) -> None:
        super().__init__(knob.key, knob.label or knob.key, text, default=field_text(knob.default))
        self.knob = knob

    def _make_control(self) -> Widget:
        choices = self._choices()
        if not choices:
            return super()._make_control()
        first = self._first if self._first in choices else choices[0]
        return select([(Text(choice), choice) for choice in choices], first)

    def _choices(self) -> Sequence[str]:
        if self.knob.type == "bool":
            return ("true", "false")
        return self.knob.choices if self.knob.type == "choice" else ()

    def meaning(self) -> list[str]:
        return [w.replace("`", "") for w in (self.knob.unit, self.knob.help) if w]


class StartField(FormField):
    """A field for another run's checkpoint, from which the run starts."""

    def __init__(self, text: str) -> None:
        super().__init__(START_FROM, START_FROM, text)
        self._description = ""

    def describe(self, description: str) -> None:
        """Describe the chosen checkpoint; an empty text restores the general meaning."""
        self._description = description

    def meaning(self) -> list[str]:
        return [self._description or "another run's checkpoint: RUN or RUN:STEP"]


class TextField(FormField):
    """A field for any text."""

    def __init__(self, key: str, meaning: str) -> None:
        super().__init__(key, key, "")
        self._meaning = meaning

    def meaning(self) -> list[str]:
        return [self._meaning]


class ChoiceField(FormField):
    """A field to choose one of several options."""

    def __init__(self, key: str, options: Sequence[tuple[str, str]]) -> None:
        """``options`` are texts with their values. The first option is chosen."""
        super().__init__(key, key, options[0][1])
        self._options = tuple(options)

    def _make_control(self) -> Widget:
        return select([(Text(text), value) for text, value in self._options], self._first)


def select(options: Sequence[tuple[Text, str]], value: str) -> Select[str]:
    """Return a selection that is as high and wide as an input."""
    return Select(options, value=value, allow_blank=False, compact=True)


class Form(VerticalScroll):
    """Fields, and a ``#form-problems`` below them for the problems that belong to no field."""

    can_focus = False

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show each problem at its field, and the others below the fields."""
        by_key: dict[str, list[Problem]] = {}
        for problem in problems:
            by_key.setdefault(problem.where, []).append(problem)
        for field in self.query(FormField):
            field.show_problems(by_key.pop(field.key, ()))
        lines = [str(problem) for unassigned in by_key.values() for problem in unassigned]
        text = Text("\n".join(f"✗ {clean_line(line)}" for line in lines), "bold")
        for widget in self.query("#form-problems").results(Static):
            widget.update(text)
            widget.display = bool(lines)

    def problem_lines(self, problems: Sequence[Problem]) -> list[str]:
        """Return one line for each problem, with the label and the key of its field."""
        labels = self._labels()
        lines = []
        for problem in problems:
            label = labels.get(problem.where, problem.where)
            where = label if label == problem.where else f"{label} ({problem.where})"
            lines.append(clean_line(f"{where}: {_sentence(problem)}"))
        return lines

    def error_summary(self, problems: Sequence[Problem]) -> str:
        """Return the sentence of the first error, and the number of errors if there are several."""
        count = "" if len(problems) == 1 else f"{len(problems)} errors, first: "
        where = self._labels().get(problems[0].where, problems[0].where)
        return clean_line(f"{count}{where}: {_sentence(problems[0])}")

    def _labels(self) -> dict[str, str]:
        return {field.key: field.label for field in self.query(FormField)}


def _sentence(problem: Problem) -> str:
    return f"{problem.what} {problem.remedy}" if problem.remedy else problem.what
