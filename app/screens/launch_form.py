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
from ltui.training.run.form import START_FROM, field_texts
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

    @property
    def start_from(self) -> str:
        """The run whose checkpoint is asked for, ``RUN`` or ``RUN:STEP``; empty for none."""
        fields = list(self.query(StartField))
        return fields[0].text.strip() if fields else ""

    async def show(self, preset: Preset) -> None:
        """Put up the fields of ``preset``, with what it says in them."""
        # An edited preset is begun from where it was to begin before.
        same = self.preset is not None and self.preset.name == preset.name
        start = StartField(self.start_from if same else "")
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
        await self.mount_all([Static(about, id="about"), *parts, start, others])

    def show_gpus(self, text: Text) -> None:
        """What is free on this machine, below the fields."""
        if text != self._gpus:
            self._gpus = text
            for where in self.query("#form-gpus").results(Static):
                where.update(text)

    def texts(self) -> dict[str, str]:
        """What is in the fields, by knob key."""
        return {field.knob.key: field.text for field in self.query(KnobField)}

    def show_start(self, words: str) -> None:
        """What the run would start from; nothing where it begins anew."""
        for field in self.query(StartField):
            field.explain(words)

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Each beside its field, what belongs to none below them."""
        by_key: dict[str, list[Problem]] = {}
        for problem in problems:
            by_key.setdefault(problem.where, []).append(problem)
        fields = {field.key: field for field in self.query(FormField)}
        for key, field in fields.items():
            field.say(by_key.get(key, ()))
        rest = [str(p) for key, found in by_key.items() if key not in fields for p in found]
        shown = Text("\n".join(f"✗ {clean_line(line)}" for line in rest), "bold")
        for where in self.query("#form-problems").results(Static):
            where.update(shown)


class FormField(Horizontal):
    """Label, field, and what is to say about it."""

    def __init__(self, key: str, label: str, first: str) -> None:
        """``key``: where its problems stand; ``first``: what it holds at first."""
        super().__init__()
        self.key = key
        self._label = label
        self._first = first
        self._control: Widget | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text(clean_name(self._label)), classes="label")
        self._control = self._made()
        yield self._control
        yield Static(self._meaning(), classes="beside", markup=False)

    def _made(self) -> Widget:
        return Input(self._first, compact=True, select_on_focus=False)

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
        raise NotImplementedError

    @on(Input.Changed)
    @on(Select.Changed)
    def _changed(self, event: Message) -> None:
        event.stop()
        self.post_message(LaunchForm.Changed())

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(LaunchForm.Entered())


class KnobField(FormField):
    """A key of the configuration."""

    def __init__(self, knob: Knob, text: str) -> None:
        super().__init__(knob.key, knob.label or knob.key, text)
        self.knob = knob

    def _made(self) -> Widget:
        choices = self._choices()
        if not choices:
            return super()._made()
        return Select(
            [(Text(c), c) for c in choices],
            value=self._first if self._first in choices else choices[0],
            allow_blank=False,
            compact=True,
        )

    def _choices(self) -> Sequence[str]:
        if self.knob.type == "bool":
            return ("true", "false")
        return self.knob.choices if self.knob.type == "choice" else ()

    def _meaning(self) -> Text:
        words = [w for w in (self.knob.unit, self.knob.help) if w]
        return Text(clean_line(" · ".join(words)).replace("`", ""))


class StartField(FormField):
    """Another run's checkpoint, which the run begins with."""

    def __init__(self, text: str) -> None:
        super().__init__(START_FROM, START_FROM, text)
        self._words = ""

    def explain(self, words: str) -> None:
        self._words = words

    def _meaning(self) -> Text:
        return Text(clean_line(self._words or "another run's checkpoint: RUN or RUN:STEP"))


def _sentence(problem: Problem) -> str:
    return f"{problem.what} {problem.remedy}" if problem.remedy else problem.what
