"""The form of a preset: one field a knob, each with its mistake or its meaning beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Select, Static

from ltui.training.problem import Problem
from ltui.training.run.form import field_texts
from ltui.training.run.presets import Preset
from ltui.training.run.section import Knob
from ltui.widgets.sanitise import clean_line, clean_name


class LaunchForm(VerticalScroll):
    """Fields for one preset at a time. It checks nothing: home does, and tells it what is wrong."""

    can_focus = False

    class Changed(Message):
        """A field's text is another one now."""

    class Entered(Message):
        """Enter in a field."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self.preset: Preset | None = None
        self._gpus = Text()

    async def show(self, preset: Preset) -> None:
        """Put up the fields of ``preset``, with what it says in them."""
        self.preset = preset
        await self.remove_children()
        texts = field_texts(preset)
        about = Text(clean_line(" ".join(preset.about.split()) or preset.title))
        rows = [KnobField(knob, texts[knob.key]) for knob in preset.knobs]
        others = Static(id="form-problems", markup=False)
        gpus = Static(self._gpus, id="form-gpus", markup=False)
        # Beside what they are chosen by.
        devices = [n for n, row in enumerate(rows, 1) if row.knob.type == "devices"]
        below = devices[0] if devices else len(rows)
        parts = [*rows[:below], gpus, *rows[below:]]
        await self.mount_all([Static(about, id="about"), *parts, others])

    def show_gpus(self, text: Text) -> None:
        """What is free on this machine, below the fields."""
        if text != self._gpus:
            self._gpus = text
            for where in self.query("#form-gpus").results(Static):
                where.update(text)

    def texts(self) -> dict[str, str]:
        """What is in the fields, by knob key."""
        return {field.knob.key: field.text for field in self.query(KnobField)}

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Each beside its field, what belongs to none below them."""
        by_key: dict[str, list[Problem]] = {}
        for problem in problems:
            by_key.setdefault(problem.where, []).append(problem)
        fields = {field.knob.key: field for field in self.query(KnobField)}
        for key, field in fields.items():
            field.say(by_key.get(key, ()))
        rest = [str(p) for key, found in by_key.items() if key not in fields for p in found]
        shown = Text("\n".join(f"✗ {clean_line(line)}" for line in rest), "bold")
        for where in self.query("#form-problems").results(Static):
            where.update(shown)


class KnobField(Horizontal):
    """Label, field, and what is to say about it."""

    def __init__(self, knob: Knob, text: str) -> None:
        super().__init__()
        self.knob = knob
        self._first = text
        self._control: Widget | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text(clean_name(self.knob.label or self.knob.key)), classes="label")
        choices = self._choices()
        if choices:
            control: Widget = Select(
                [(Text(c), c) for c in choices],
                value=self._first if self._first in choices else choices[0],
                allow_blank=False,
                compact=True,
            )
        else:
            control = Input(self._first, compact=True, select_on_focus=False)
        self._control = control
        yield control
        yield Static(self._meaning(), classes="beside", markup=False)

    def _choices(self) -> Sequence[str]:
        if self.knob.type == "bool":
            return ("true", "false")
        return self.knob.choices if self.knob.type == "choice" else ()

    @property
    def text(self) -> str:
        control = self._control
        if isinstance(control, (Input, Select)):
            return str(control.value)
        return self._first

    def say(self, problems: Sequence[Problem]) -> None:
        self.set_class(bool(problems), "-wrong")
        beside = self.query_one(".beside", Static)
        if problems:
            words = " ".join(_sentence(p) for p in problems)
            beside.update(Text(f"✗ {clean_line(words)}", "bold"))
        else:
            beside.update(self._meaning())

    def _meaning(self) -> Text:
        words = [w for w in (self.knob.unit, self.knob.help) if w]
        return Text(clean_line(" · ".join(words)).replace("`", ""))

    @on(Input.Changed)
    @on(Select.Changed)
    def _changed(self, event: Message) -> None:
        event.stop()
        self.post_message(LaunchForm.Changed())

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(LaunchForm.Entered())


def _sentence(problem: Problem) -> str:
    return f"{problem.what} {problem.remedy}" if problem.remedy else problem.what
