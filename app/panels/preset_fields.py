"""The form of a preset: one field for each setting, and the run to start from."""

from __future__ import annotations

from asyncio import Lock
from typing import NamedTuple

from rich.text import Text
from textual.widget import Widget
from textual.widgets import Static

from ltui.app.panels.form_fields import Form, KnobField, LabelField, StartField
from ltui.training.config.preset_form import START_FROM, field_texts
from ltui.training.config.presets import Preset
from ltui.widgets.sanitise import clean_line


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
