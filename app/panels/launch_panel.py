"""The form of the selected preset on the home screen.

The form is checked while the user types. It can be edited as YAML, and launched.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.message import Message

from ltui.app.keys.ordered_input import OrderedKeysApp
from ltui.app.panels.panel import LaunchLine, Panel, Submitted
from ltui.app.screens.dialog import TYPED_AT_ONCE, ProblemScreen, call_screen, error_lines

if TYPE_CHECKING:
    from textual.timer import Timer

    from ltui.app.panels.form_fields import FormTexts, LaunchForm
    from ltui.training.config.device_selection import Machine
    from ltui.training.config.presets import FormResult, Preset
    from ltui.training.state.run_labels import RunLabels
    from ltui.training.store.run_directory import RunDir

CHECK_AFTER_S = 0.15
"""Seconds after the last change of a field until the form is checked."""
READONLY = "This dashboard only watches. Nothing was started or changed."
NOTHING_SELECTED = "Select a preset that can be read."


class FormPanel(Panel):
    """The panel with the form, its checks and its launch line."""

    @dataclass
    class Launched(Message):
        """A run was launched, and its supervisor answered."""

        run_dir: RunDir

    @dataclass
    class Queued(Message):
        """A run was put into the run queue."""

        run_dir: RunDir

    @dataclass
    class Checked(Message):
        """The form was checked; ``text`` is the configuration that Lightning would get."""

        text: str
        changed: frozenset[int]
        """The lines, from 0, that differ from the preset."""

    def __init__(self, home: Path, *, readonly: bool, id: str) -> None:  # noqa: A002
        super().__init__(2, "reading presets …", id=id)
        self.home, self.readonly = home, readonly
        self.preset: Preset | None = None
        self.result: FormResult | None = None
        """The result of the last check; None while the form is being checked."""
        self.machine: Machine
        self.form: LaunchForm | None = None
        """The form; None before it is mounted."""
        self._has_machine = False
        self._presets: dict[str, Preset] = {}
        """The presets that were shown, as their files have them."""
        self._edited: dict[str, Preset] = {}
        self._check_timer: Timer | None = None
        self._launching = False
        self._focused_at = -math.inf
        """Time of the app's clock at which the key or the click came that led to the form."""
        self._wants_focus = False
        """The launch line takes the focus as soon as there is a form."""

    def compose(self) -> ComposeResult:
        yield LaunchLine(id="launch-line", markup=False)

    def on_mount(self) -> None:
        self.query_one(LaunchLine).display = False

    async def start(self) -> None:
        """Mount the form. It is checked once ``use_machine`` was called."""
        # Imported here: the first frame has no form.
        from ltui.app.panels.form_fields import FieldHint, LaunchForm
        from ltui.training.config.device_selection import UNKNOWN_MACHINE

        self.machine = UNKNOWN_MACHINE
        form = LaunchForm(id="launch-form")
        # A value may name variables of the environment, which a person who only watches must not
        # read: ${oc.env:NAME}.
        form.disabled = self.readonly
        await self.mount_all([form, FieldHint()], before="#launch-line")
        self.form = form

    def use_machine(self, machine: Machine) -> None:
        """Check the form for this machine from now on."""
        self.machine, self._has_machine = machine, True
        self._check_form()

    # -- the preset in the form --------------------------------------------------------------------

    async def show_preset(self, preset: Preset, *, keep: bool = True) -> None:
        """Show the form of ``preset``; with ``keep``, with the values and edits made before."""
        form = self.form
        if form is None:
            return
        self._presets.setdefault(preset.name, preset)
        shown = self._edited.get(preset.name, preset)
        self.preset, self.result = shown, None
        title = shown.title if shown is preset else f"{shown.title} (edited)"
        self.set_titles(title, " ".join(shown.tags))
        await form.show(shown, keep=keep)
        line = self.query_one(LaunchLine)
        line.display = True
        line.show("checking …", ready=False)
        if self._wants_focus:
            self.focus_launch_line()
        self._check_form()

    def focus_entered(self) -> None:
        """Take the time at which the focus came to the form from elsewhere."""
        self._focused_at = cast(OrderedKeysApp, self.app).input_at

    def focus_launch_line(self) -> None:
        """Move the focus to the launch line, at the latest when the form is shown."""
        line = self.query_one(LaunchLine)
        self._wants_focus = not line.display
        if line.display:
            line.focus()

    async def show_nothing(self, title: str, text: Text) -> None:
        """Show the reason why there is no form."""
        self.preset = self.result = None
        self._wants_focus = False
        self.set_titles(title)
        self.query_one(LaunchLine).display = False
        if self.form is not None:
            await self.form.show_message(text)

    async def reset(self, preset: Preset) -> None:
        """Discard everything that was typed and edited for ``preset``."""
        self._edited.pop(preset.name, None)
        if self.form is not None:
            await self.form.forget(preset)
        await self.show_preset(preset)

    # -- checking ----------------------------------------------------------------------------------

    def on_form_field_changed(self, event: Message) -> None:
        event.stop()
        self.result = None
        if self._check_timer is not None:
            self._check_timer.stop()
        self._check_timer = self.set_timer(CHECK_AFTER_S, self._check_form)

    def _check_form(self) -> None:
        form = self.form
        if form is None or not self._has_machine:
            return
        if form.preset is not None and form.preset is self.preset:
            self._check(form.preset, form.texts())

    @work(thread=True, exclusive=True, group="check")
    def _check(self, preset: Preset, texts: FormTexts) -> None:
        # Imported here, in the worker's thread: the first frame checks nothing.
        from ltui.app.launch.launch_text import changed_lines, launch_summary
        from ltui.training.config.yaml_document import resolve, write_document

        result, start = self._checked(preset, texts)
        text = write_document(resolve(result.document)[0])
        before = write_document(resolve(self._presets[preset.name].document)[0])
        changed = changed_lines(before, text)
        summary = launch_summary(result.document, self.machine, preset.cpu_ranks)
        if start:
            summary += f", from {start}"

        def checked() -> None:
            form = self.form
            if form is None or form.preset is not preset:
                return
            if form.texts() == texts:
                form.show_start(start)
                self._show_result(form, result, summary)
                self.post_message(self.Checked(text, changed))

        call_screen(self, checked)

    def _checked(self, preset: Preset, texts: FormTexts) -> tuple[FormResult, str]:
        """Check every field. Return the result with all problems, and the checkpoint to start
        from in words."""
        # Imported here, in the worker's thread: the first frame checks nothing.
        from ltui.training.config.presets import apply_form
        from ltui.training.problem import ProblemError

        result = apply_form(preset, texts.settings, self.machine)
        start, problems = "", list(result.problems)
        try:
            _labels(texts)
        except ProblemError as error:
            problems += error.problems
        if texts.start_from:
            # Imported here: most runs start from the beginning.
            from ltui.app.launch.build_spec import describe_start

            try:
                start = describe_start(self.home, texts.start_from)
            except ProblemError as error:
                problems += error.problems
        return replace(result, problems=tuple(problems)), start

    def _show_result(self, form: LaunchForm, result: FormResult, summary: str) -> None:
        self.result = result
        form.show_problems(result.problems)
        line = self.query_one(LaunchLine)
        if self.readonly:
            remedy = "ltui serve --control" if self.app.is_web else "--readonly"
            line.show(f"watching only ({remedy})", ready=False)
        elif result.problems:
            line.show_error(form.error_summary(result.problems))
        else:
            line.show(summary, ready=True)

    def _usable_form(self) -> tuple[Preset, FormTexts] | None:
        """Return the preset with the texts of its fields; None, after the reason was shown, if
        there is none or nobody may use it."""
        if not self.readonly and self.preset is not None and self.form is not None:
            return self.preset, self.form.texts()
        self.refuse(READONLY if self.readonly else NOTHING_SELECTED)
        return None

    def check_with_classes(self) -> None:
        """Check the form by importing the classes of its configuration, which runs their code."""
        if (shown := self._usable_form()) is not None:
            self.notify("checking (a few seconds) …", timeout=4)
            self._deep_check(shown[0], shown[1].settings)

    @work(thread=True, exclusive=True, group="deep check")
    def _deep_check(self, preset: Preset, texts: dict[str, str]) -> None:
        # Imported here, in the worker's thread: the first frame checks nothing.
        from ltui.app.launch.build_spec import prepare_preset_launch
        from ltui.app.launch.run_in_interpreter import check_with_classes
        from ltui.training.config.presets import apply_form
        from ltui.training.problem import ProblemError

        result = apply_form(preset, texts, self.machine)
        try:
            if result.problems:
                raise ProblemError(*result.problems)
            check_with_classes(prepare_preset_launch(preset, result.overrides))
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            wrong = "would not run" if isinstance(error, ProblemError) else "could not be checked"
            call_screen(self, self._show_error, f"{preset.name} {wrong}", preset, error)
        else:
            self._show_notice(f"{preset.name}: OK. The configuration loads in this environment.")

    # -- editing -----------------------------------------------------------------------------------

    def edit(self) -> None:
        """Open the configuration as YAML."""
        if (usable := self._usable_form()) is None:
            return
        # Imported here: the first frame has no editor.
        from ltui.app.launch.launch_defaults import with_launch_defaults
        from ltui.app.launch.launch_text import editor_text, preset_from_text, text_problems
        from ltui.app.screens.yaml_editor import YamlScreen
        from ltui.training.config.presets import apply_form
        from ltui.training.problem import ProblemError

        preset, texts = usable
        shown = preset
        # A launch reports what is wrong with the defaults.
        with suppress(ProblemError):
            shown = with_launch_defaults(preset)
        text = editor_text(shown, apply_form(preset, texts.settings, self.machine).document)

        async def edited(new: str | None) -> None:
            if new is not None and new != text:
                self._edited[preset.name] = preset_from_text(preset, new)
                await self.show_preset(preset, keep=False)
                self.notify("Enter launches the edited configuration.", timeout=4)

        title = f"{preset.name}: configuration; `ltui:` sets checkpoints, stalls and restarts"
        self.app.push_screen(
            YamlScreen(title, text, lambda t: text_problems(preset, t, self.machine)), edited
        )

    # -- launching ---------------------------------------------------------------------------------

    def launch(self, *, queued: bool = False) -> None:
        """Launch the run that the launch line describes, or put it into the run queue."""
        shown = self._usable_form()
        if shown is None:
            return
        if not cast(OrderedKeysApp, self.app).had_pause(self._focused_at):
            self.refuse(TYPED_AT_ONCE)
        elif not self._launching:
            self._launching = True
            self._launch(*shown, queued=queued)

    @work(thread=True, group="launch")
    def _launch(self, preset: Preset, texts: FormTexts, *, queued: bool) -> None:
        # Imported here, in the worker's thread: the first frame launches nothing.
        from ltui.app.launch.build_spec import start_run
        from ltui.training.problem import ProblemError
        from ltui.training.state.run_queue import QueueEntry

        try:
            doing = "queueing" if queued else "launching"
            result, _ = self._checked(preset, texts)
            if result.problems:
                raise ProblemError(*result.problems)
            run_dir = start_run(
                self.home,
                preset,
                result.overrides,
                texts.start_from,
                _labels(texts),
                texts.labels["name"],
                lambda: self._show_notice(f"{doing} {preset.name} …"),
                QueueEntry() if queued else None,
            )
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            title = f"{preset.name} was not {'queued' if queued else 'launched'}"
            call_screen(self, self._show_error, title, preset, error)
        else:
            message = self.Queued(run_dir) if queued else self.Launched(run_dir)
            call_screen(self, self.post_message, message)
        finally:
            self._launching = False

    # -- messages ----------------------------------------------------------------------------------

    def _show_error(self, title: str, preset: Preset, error: Exception) -> None:
        lines, problems = error_lines(error), getattr(error, "problems", ())
        if problems and self.form is not None and self.form.preset is preset:
            self.form.show_problems(problems)
            lines = self.form.problem_lines(problems)
        self.app.push_screen(ProblemScreen(title, lines))

    def _show_notice(self, message: str) -> None:
        """Show a message of a worker's thread."""
        call_screen(self, partial(self.notify, message, timeout=4, markup=False))

    def refuse(self, reason: str) -> None:
        """Show the reason why nothing was done."""
        self.notify(reason, severity="warning", markup=False)

    @on(Submitted)
    def _submitted(self, event: Submitted) -> None:
        event.stop()
        self.launch()


def _labels(texts: FormTexts) -> RunLabels:
    """Return the labels of the form. Raises ``ProblemError`` with the keys of their fields."""
    # Imported here: the first frame has no form.
    from ltui.training.state.run_labels import checked_name, new_labels
    from ltui.training.store.run_directory import given_name

    where = tags, group, note = "tags", "group", "note"
    texts_of = texts.labels
    labels = new_labels([texts_of[tags]], texts_of[group], texts_of[note], where)
    return replace(labels, name=checked_name(given_name(texts_of["name"] or None), "name"))
