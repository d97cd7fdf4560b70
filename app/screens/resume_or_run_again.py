"""The form to resume a run, or to start a new run with the settings of an existing one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from ltui.app.launch.local_machine import detect_machine
from ltui.app.launch.past_run import (
    FROM_CHECKPOINT,
    FROM_START,
    NEWEST,
    OTHER_CHANGES,
    RESUME,
    CheckedChoice,
    Choice,
    PastRun,
    check_choice,
    read_past_run,
    start_choice,
)
from ltui.app.panels.form_fields import FieldHint, Form, FormField, KnobField
from ltui.app.panels.panel import LaunchLine, Submitted
from ltui.app.presentation.snapshot_text import SUPERSEDED, saved_when, weights_text
from ltui.app.screens.dialog import TYPED_AT_ONCE, Dialog, ProblemScreen, call_screen
from ltui.training.config.device_selection import Machine
from ltui.training.config.presets import field_text
from ltui.training.problem import Problem
from ltui.training.state.good_checkpoints import FINITE
from ltui.training.state.run_snapshot import CheckpointInfo
from ltui.training.store.run_directory import RunDir
from ltui.widgets import formats
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line, clean_name

CHECK_AFTER_S = 0.15
"""Seconds after the last change of a field until the form is checked."""
START, CHECKPOINT = "start", "checkpoint"
"""Keys of the two fields that are not part of the configuration."""
OTHER_MEANING = "KEY=VALUE ..., such as trainer.precision=16-mixed"


class RunAgainScreen(Dialog[RunDir]):
    """Return the run that was started, or None."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "rerun",
        """
        enter  | submit | start  | Start what the last line describes
        escape | cancel | cancel | Close the form and start nothing
        """,
    )

    # Without ClassVar, as Textual declares it.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-roomy")]  # noqa: RUF012

    def __init__(self, run_dir: RunDir, name: str, *, new_run: bool) -> None:
        """``name``: that of the run. With ``new_run`` the form proposes a new run, otherwise
        another attempt."""
        super().__init__()
        self.run_dir, self.run_name, self.new_run = run_dir, clean_name(name), new_run
        self.past: PastRun | None = None
        self.checked: CheckedChoice | None = None
        self._machine = Machine()
        self._submitted = False
        self._starting = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            title = "Run again" if self.new_run else "Resume"
            yield Static(Text(f"{title}: {self.run_name}", "bold"), id="question")
            yield Form(id="fields")
            yield FieldHint()
            yield LaunchLine(id="launch-line", markup=False)
            yield Static("⏎ start   tab next   f1 help   esc cancel", id="answers")

    def on_mount(self) -> None:
        self._timer = self.set_timer(CHECK_AFTER_S, self._check)
        self._timer.pause()
        self._describe("reading …")
        self._read()

    # -- the form ----------------------------------------------------------------------------------

    @work(thread=True)
    def _read(self) -> None:
        try:
            past = read_past_run(self.run_dir)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            call_screen(self, self._unreadable, str(error))
        else:
            call_screen(self, self._show, past, detect_machine(os.environ))

    def _unreadable(self, reason: str) -> None:
        self.dismiss(None)
        self.app.push_screen(ProblemScreen(f"{self.run_name} can't be started", [reason]))

    async def _show(self, past: PastRun, machine: Machine) -> None:
        self.past, self._machine = past, machine
        fields = self.query_one("#fields")
        await fields.remove_children()
        settings = f"Settings of attempt {past.attempt}: {', '.join(past.changed)}."
        texts = {
            "changed-settings": settings if past.changed else "",
            "changed-code": past.code,
            "changed-environment": past.environment,
        }
        notes = [
            Static(Text(clean_line(text, 500), "dim"), id=name)
            for name, text in texts.items()
            if text
        ]
        problems = Static(id="form-problems", markup=False)
        await fields.mount_all([*notes, *self._fields(past), problems])
        self._check()
        inputs = self.query("#fields .-wrong Input") or self.query("#fields Input")
        (inputs or self.query(LaunchLine)).first().focus()
        if self._submitted:
            self.action_submit()

    def _fields(self, past: PastRun) -> list[FormField]:
        modes = [mode for mode in past.modes if mode != RESUME or not self.new_run]
        if self.new_run:
            # A new run needs the settings; the weights to start from are a second choice.
            modes.sort(key=lambda mode: mode != FROM_START)
        fields: list[FormField] = [
            FormField(START, options=[(_mode_text(mode, past), mode) for mode in modes])
        ]
        if past.checkpoints:
            fields.append(FormField(CHECKPOINT, options=_checkpoint_options(past)))
        fields += [KnobField(k, field_text(k.default)) for k in past.preset.knobs]
        if past.spec.config is not None:
            fields.append(FormField(OTHER_CHANGES, meaning=OTHER_MEANING))
        return fields

    def _choice(self) -> Choice:
        texts = {field.key: field.text for field in self.query(FormField)}
        knobs = {field.key: field.text for field in self.query(KnobField)}
        return Choice(
            mode=texts[START],
            checkpoint=texts.get(CHECKPOINT, NEWEST),
            texts=knobs,
            other=texts.get(OTHER_CHANGES, ""),
        )

    def _check(self) -> None:
        if self.past is None or self._starting or not self.query(FormField):
            return  # The form is not shown yet, or not any more, or it has been submitted.
        choice, form = self._choice(), self.query_one(Form)
        for field in form.query(FormField):
            if field.key == CHECKPOINT:
                field.display = choice.mode != FROM_START
        self.checked = check_choice(self.past, choice, self._machine)
        form.show_problems(self.checked.problems)
        problems = self.checked.problems
        if problems:
            self.query_one(LaunchLine).show_error(form.error_summary(problems))
        else:
            self._describe(clean_line(self.checked.words), ready=True)

    def _describe(self, description: str, *, ready: bool = False) -> None:
        """Show a description behind the button, which has the name of what it does."""
        resumes = self._choice().mode == RESUME if self.query(FormField) else not self.new_run
        name = "Resume" if resumes else "Launch"
        self.query_one(LaunchLine).show(description, ready=ready, name=name)

    def on_form_field_changed(self, event: Message) -> None:
        event.stop()
        self.checked = None
        self._timer.stop()
        self._timer = self.set_timer(CHECK_AFTER_S, self._check)

    # -- starting ----------------------------------------------------------------------------------

    @on(Submitted)
    def _form_submitted(self, event: Submitted) -> None:
        event.stop()
        self.action_submit()

    def action_submit(self) -> None:
        """Start the run, or wait until the form is shown."""
        if self.is_typed_at_once:
            self.notify(TYPED_AT_ONCE, severity="warning")
            return
        self._submitted = True
        if self.past is None or self._starting:
            return
        self._check()
        if self.checked is None or self.checked.problems:
            return
        self._starting = True
        self._describe("starting …")
        self._start(self.past, self._choice(), self.checked.overrides)

    @work(thread=True, group="launch")
    def _start(self, past: PastRun, choice: Choice, overrides: tuple[str, ...]) -> None:
        try:
            run_dir = start_choice(self.run_dir.home, past, choice, overrides)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            problem = Problem(where=self.run_dir.id, what=f"{type(error).__name__}: {error}")
            call_screen(self, self._not_started, getattr(error, "problems", (problem,)))
        else:
            call_screen(self, self.dismiss, run_dir)

    def _not_started(self, problems: Sequence[Problem]) -> None:
        self._starting = False
        self._check()
        form = self.query_one(Form)
        form.show_problems(problems)
        self.app.push_screen(ProblemScreen("nothing was started", form.problem_lines(problems)))

    def action_cancel(self) -> None:
        if not self._starting:
            self.dismiss(None)


def _mode_text(mode: str, past: PastRun) -> str:
    return {
        RESUME: f"resume this run, attempt {past.attempt + 1}",
        FROM_CHECKPOINT: "new run from the checkpoint",
        FROM_START: "new run from the beginning",
    }[mode]


def _checkpoint_options(past: PastRun) -> list[tuple[str, str]]:
    """Return the checkpoint of a resume first. Those after the first NaN are marked."""
    first, *others = past.checkpoints
    text, value = _checkpoint_text(past, first), Path(first.path).name
    if past.badness(first) is None:
        is_newest = all(past.badness(info) is None for info in others)
        title = "newest" if is_newest else "before the NaN"
        text, value = f"{title}: step {formats.count(first.global_step)}", NEWEST
    marked = ((_checkpoint_text(past, info), Path(info.path).name) for info in others)
    return [(text, value), *marked]


def _checkpoint_text(past: PastRun, info: CheckpointInfo) -> str:
    mark = saved_when(info.reason) if info.reason else ""
    if info.weights not in (None, FINITE):
        mark = weights_text(info)
    elif past.badness(info) is not None:
        mark = "after the first NaN"
    elif info.superseded:
        mark = SUPERSEDED
    return f"step {formats.count(info.global_step)}" + (f" ({mark})" if mark else "")
