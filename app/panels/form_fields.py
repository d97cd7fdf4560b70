"""The fields of a form: a label, an input, and a note with its problem or its meaning.

The form of a preset has one field for each setting, and one for the run to start from.
"""

from __future__ import annotations

from asyncio import Lock
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Select, Static

from ltui.app.panels.panel import Submitted
from ltui.training.config.ltui_section import Knob
from ltui.training.config.presets import START_FROM, Preset, field_text, field_texts
from ltui.training.problem import Problem
from ltui.widgets.sanitise import clean_line, clean_name

DEVICES_HINT = "2, 0,1 or free:2"
MOST_WORDS = 4
"""Maximum number of words beside a field."""


class FormSelect(Select[str]):
    """A choice that may be removed while it is being mounted, because the form is replaced."""

    def _watch_value(self, value: Any) -> None:
        if self.query("#label"):
            super()._watch_value(value)


class FormField(Horizontal):
    """One field. It does not check its text: the screen does and calls ``show_problems``."""

    class Changed(Message):
        """The text of the field changed."""

    def __init__(
        self,
        key: str,
        *,
        label: str = "",
        text: str = "",
        default: str | None = None,
        options: Sequence[tuple[str, str]] = (),
        meaning: str = "",
        help: str = "",  # noqa: A002 - as argparse names it
    ) -> None:
        """``key`` is the place that problems name. Texts other than ``default`` are marked.

        ``meaning`` is beside the field, at most four words. ``help``, a sentence, is shown by a
        ``FieldHint`` while the field has the focus.

        With ``options``, texts with their values, one of them is chosen; the first by default.
        """
        super().__init__()
        self.key, self.label = key, label or key
        self.meaning = meaning
        self.help = help
        self.problem_text = ""
        """The problems of the last check; a narrow note cuts them."""
        self._default, self._last = default, text
        self._control: Input | Select[str]
        if options:
            values = [value for _, value in options]
            self._control = FormSelect(
                [(Text(option), value) for option, value in options],
                value=text if text in values else values[0],
                allow_blank=False,
                compact=True,
            )
        else:
            self._control = Input(text, compact=True, select_on_focus=False)

    def compose(self) -> ComposeResult:
        yield Static(Text(clean_name(self.label)), classes="label")
        yield self._control
        yield Static(self._note(), classes="field-note", markup=False)

    def on_mount(self) -> None:
        self.set_class(self.changed, "-changed")

    @property
    def text(self) -> str:
        return str(self._control.value)

    @text.setter
    def text(self, text: str) -> None:
        self._control.value = text

    @property
    def changed(self) -> bool:
        """True if the text differs from the default."""
        return self._default is not None and self.text.strip() != self._default

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show the problems in the note; without problems, the meaning of the field."""
        self.set_class(bool(problems), "-wrong")
        self.problem_text = " ".join(_sentence(p) for p in problems)
        self.query_one(".field-note", Static).update(self._note())

    def _note(self) -> Text:
        if self.problem_text:
            return Text(f"✗ {clean_line(self.problem_text)}", "bold")
        parts = (f"was {self._default or 'empty'}" if self.changed else "", self.meaning)
        return Text(clean_line(" · ".join(part for part in parts if part)))

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
        self.post_message(Submitted())


class FieldHint(Static):
    """The line below a form with the problems or the help of the field that has the focus."""

    def on_mount(self) -> None:
        self.watch(self.screen, "focused", self.show)

    def show(self, focused: Widget | None) -> None:
        above = [] if focused is None else focused.ancestors
        field = next((node for node in above if isinstance(node, FormField)), None)
        if field is not None and field.problem_text:
            self.update(Text(f"✗ {clean_line(field.problem_text)}", "bold"))
        else:
            self.update(Text("" if field is None else clean_line(field.help)))


class KnobField(FormField):
    """A field for one key of the configuration."""

    def __init__(self, knob: Knob, text: str) -> None:
        choices = knob.choices if knob.type == "choice" else ()
        if knob.type == "bool":
            choices = ("true", "false")
        super().__init__(
            knob.key,
            label=knob.label or "",
            text=text,
            default=field_text(knob.default),
            options=[(choice, choice) for choice in choices],
            meaning=_short_hint(knob),
            help=knob.help.replace("`", ""),
        )
        self.knob = knob


class LabelField(FormField):
    """A field for the name, the tags, the group or the note of a run."""

    MEANINGS: ClassVar[dict[str, str]] = {
        "name": "any characters",
        "tags": "such as base,v2",
        "group": "one name",
        "note": "one line",
    }
    """The keys of the fields, in their order, and what to type."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(key, text=text, meaning=self.MEANINGS[key])


class StartField(FormField):
    """A field for another run's checkpoint, from which the run starts."""

    MEANING: ClassVar[str] = "RUN or RUN:STEP"
    HELP: ClassVar[str] = "The checkpoint of another run, from which this run starts."

    def __init__(self, text: str) -> None:
        super().__init__(START_FROM, text=text, meaning=self.MEANING, help=self.HELP)

    def describe(self, description: str) -> None:
        """Describe the chosen checkpoint; an empty text restores the general meaning."""
        self.meaning = description or self.MEANING


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
        for hint in self.screen.query(FieldHint):
            hint.show(self.screen.focused)
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


def _short_hint(knob: Knob) -> str:
    """Return what to type into a field, in at most four words; empty if that takes more."""
    if knob.type == "devices":
        return DEVICES_HINT
    hint = knob.unit or knob.help.replace("`", "").rstrip(".")
    return hint if len(hint.split()) <= MOST_WORDS else ""


def _sentence(problem: Problem) -> str:
    return f"{problem.what} {problem.remedy}" if problem.remedy else problem.what


class FormTexts(NamedTuple):
    """What the fields of a form hold."""

    settings: dict[str, str]
    """By the key of the setting."""
    start_from: str
    """The checkpoint to start from, as ``RUN`` or ``RUN:STEP``; empty for none."""
    labels: dict[str, str]
    """Name, tags, group and note."""


class LaunchForm(Form):
    """The fields of one preset at a time. Values that were typed are stored for each preset."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self.preset: Preset | None = None
        """The preset of the shown fields; None while they are being replaced."""
        self._changing = Lock()
        self._values: dict[str, dict[str, str]] = {}
        """The typed texts by field key, by preset name."""
        self._gpus = Text()

    def texts(self) -> FormTexts:
        """Return the texts of the fields."""
        starts = list(self.query(StartField))
        return FormTexts(
            settings={field.knob.key: field.text for field in self.query(KnobField)},
            start_from=starts[0].text.strip() if starts else "",
            labels={field.key: field.text.strip() for field in self.query(LabelField)},
        )

    async def show(self, preset: Preset, *, keep: bool = True) -> None:
        """Show the fields of ``preset`` with the values that were typed before.

        Without ``keep`` the fields get the values of the preset.
        """
        async with self._changing:
            self._store_values()
            typed = self._values.get(preset.name, {})
            await self.remove_children()
            if not keep:
                others = (START_FROM, *LabelField.MEANINGS)
                typed = {key: text for key, text in typed.items() if key in others}
            await self.mount_all(self._make_widgets(preset, typed))
            self.preset = preset

    async def forget(self, preset: Preset) -> None:
        """Discard what was typed for ``preset``, also in the fields that are shown."""
        async with self._changing:
            self._store_values()
            self._values.pop(preset.name, None)

    async def show_message(self, text: Text) -> None:
        """Show a sentence instead of a form."""
        async with self._changing:
            self._store_values()
            await self.remove_children()
            await self.mount(Static(text))

    def _store_values(self) -> None:
        """Store the typed values; after that the fields belong to no preset."""
        if self.preset is not None:
            texts = self.texts()
            self._values[self.preset.name] = {
                **texts.settings,
                START_FROM: texts.start_from,
                **texts.labels,
            }
        self.preset = None

    def _make_widgets(self, preset: Preset, values: dict[str, str]) -> list[Widget]:
        texts = {**field_texts(preset), **values}
        about = Text(clean_line(" ".join(preset.about.split()) or preset.title))
        rows = [KnobField(knob, texts[knob.key]) for knob in preset.knobs]
        gpus = Static(self._gpus, id="form-gpus", markup=False)
        gpus.display = bool(self._gpus)
        others = Static(id="form-problems", markup=False)
        others.display = False
        # The free GPUs are listed below the field that chooses among them.
        devices = [n for n, row in enumerate(rows, 1) if row.knob.type == "devices"]
        below = devices[0] if devices else len(rows)
        widgets: list[Widget] = [*rows[:below], gpus, *rows[below:]]
        labels = [LabelField(key, values.get(key, "")) for key in LabelField.MEANINGS]
        start = StartField(values.get(START_FROM, ""))
        return [Static(about, id="about"), *widgets, start, *labels, others]

    def show_gpus(self, text: Text) -> None:
        """Show which GPUs of this machine are free."""
        if text != self._gpus:
            self._gpus = text
            for line in self.query("#form-gpus").results(Static):
                line.update(text)
                line.display = bool(text)

    def show_start(self, description: str) -> None:
        """Describe the checkpoint to start from; an empty text means a start from the beginning."""
        for field in self.query(StartField):
            field.describe(description)
