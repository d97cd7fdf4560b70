"""The form of a preset: one field for each setting, and the run to start from."""

from __future__ import annotations

from asyncio import Lock
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from ltui.app.panels.form_fields import FormField, KnobField, StartField, named, show_problems
from ltui.training.config.preset_form import field_texts
from ltui.training.config.presets import Preset
from ltui.training.problem import Problem
from ltui.widgets.sanitise import clean_line


@dataclass(frozen=True, slots=True)
class FormValues:
    """What was typed into the form of one preset."""

    texts: dict[str, str]
    """By knob key."""
    start_from: str


class LaunchForm(VerticalScroll):
    """Fields for one preset at a time. It keeps what was typed for each preset."""

    can_focus = False

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(id=id)
        self.preset: Preset | None = None
        """Whose fields are shown; None while they are being replaced."""
        self._changing = Lock()
        self._kept: dict[str, FormValues] = {}
        self._gpus = Text()

    @property
    def start_from(self) -> str:
        """The run whose checkpoint is asked for, ``RUN`` or ``RUN:STEP``; empty for none."""
        fields = list(self.query(StartField))
        return fields[0].text.strip() if fields else ""

    def texts(self) -> dict[str, str]:
        """What is in the fields, by knob key."""
        return {field.knob.key: field.text for field in self.query(KnobField)}

    async def show(self, preset: Preset, *, keep: bool = True) -> None:
        """Show the fields of ``preset`` with what was typed into them before.

        Without ``keep`` the fields hold the preset's own values again.
        """
        async with self._changing:
            self._remember()
            kept = self._kept.get(preset.name, FormValues({}, ""))
            await self.remove_children()
            values = kept if keep else FormValues({}, kept.start_from)
            await self.mount_all(self._parts(preset, values))
            self.preset = preset

    async def show_message(self, text: Text) -> None:
        """Show a sentence in place of a form."""
        async with self._changing:
            self._remember()
            await self.remove_children()
            await self.mount(Static(text))

    def _remember(self) -> None:
        """Keep what was typed; from now on the fields belong to no preset."""
        if self.preset is not None:
            self._kept[self.preset.name] = FormValues(self.texts(), self.start_from)
        self.preset = None

    def _parts(self, preset: Preset, values: FormValues) -> list[Widget]:
        texts = {**field_texts(preset), **values.texts}
        about = Text(clean_line(" ".join(preset.about.split()) or preset.title))
        rows = [KnobField(knob, texts[knob.key]) for knob in preset.knobs]
        gpus = Static(self._gpus, id="form-gpus", markup=False)
        gpus.display = bool(self._gpus)
        others = Static(id="form-problems", markup=False)
        others.display = False
        # The free GPUs are listed below the field that chooses among them.
        devices = [n for n, row in enumerate(rows, 1) if row.knob.type == "devices"]
        below = devices[0] if devices else len(rows)
        parts: list[Widget] = [*rows[:below], gpus, *rows[below:]]
        return [Static(about, id="about"), *parts, StartField(values.start_from), others]

    def show_gpus(self, text: Text) -> None:
        """Show which GPUs of this machine are free."""
        if text != self._gpus:
            self._gpus = text
            for where in self.query("#form-gpus").results(Static):
                where.update(text)
                where.display = bool(text)

    def show_start(self, words: str) -> None:
        """Show what the run would start from; nothing if it starts from the beginning."""
        for field in self.query(StartField):
            field.explain(words)

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show each problem beside its field, and the others below the fields."""
        rest = self.query("#form-problems").results(Static)
        show_problems(self.query(FormField), rest, problems)

    def named(self, problems: Sequence[Problem]) -> list[str]:
        """The problems as lines that name the fields by their labels."""
        return named(problems, self.query(FormField))
