"""Home: presets and their form on top, runs below. Everything slow comes after the first paint."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from ltui.app.screens.confirm import ConfirmScreen, ProblemScreen
from ltui.app.screens.keyline import KeyHint, KeyLine
from ltui.app.screens.keys import bindings
from ltui.app.screens.panel import Panel
from ltui.training.run.preset_names import shipped_names

if TYPE_CHECKING:
    from textual.timer import Timer

    from ltui.app.runs_list import RunLine, RunsList
    from ltui.app.screens.launch_form import LaunchForm
    from ltui.app.screens.runs_table import RunsTable
    from ltui.training.gpu.sampler import GpuSampler
    from ltui.training.problem import Problem
    from ltui.training.run.devices import Machine
    from ltui.training.run.form import FormResult
    from ltui.training.run.presets import Preset

LOOK_S = 1.0
GPUS_S = 2.0
PRESET_CELLS = 28
CHECK_AFTER_S = 0.15
"""Typing is checked once it rests for so long."""
READONLY = "this dashboard only watches (--readonly): nothing was started or changed"

KEYS = """
enter  | launch        | launch    | Launch the chosen preset; on a run: open it
e      | edit          | edit YAML | Edit the resolved configuration of the chosen preset
c      | check         | check     | Check with the real classes, where it would train
/      | filter        | filter    | Filter presets by name and tag
1      | go('presets') | presets   | Go to the presets
2      | go('form')    | form      | Go to the form
3      | go('runs')    | runs      | Go to the runs
escape | go('presets') | back      | Out of a field, back to the presets
q      | leave         | leave     | Leave ltui; runs go on
"""


class HomeScreen(Screen[None]):
    """Presets to launch and runs to open."""

    SCOPE = "home"
    ABOUT = "Runs belong to their supervisors: leaving ltui never stops one."
    BINDINGS: ClassVar[list[BindingType]] = bindings("home", KEYS)

    def __init__(self, home: Path, *, readonly: bool = False, python: str | None = None) -> None:
        super().__init__()
        self.home, self.readonly, self.python = home, readonly, python
        self.names: tuple[str, ...] = ()
        self.presets: dict[str, Preset] = {}
        self.preset: Preset | None = None
        self.result: FormResult | None = None
        self.lines: dict[str, RunLine] = {}
        self.machine: Machine
        self._broken: dict[str, str] = {}
        self._shown_yaml = ""
        self._check_timer: Timer | None = None
        self._runs: RunsList | None = None
        self._looking = False
        self._gpus: GpuSampler | None = None

    # -- building ----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(Text(" ltui", "bold"), id="title", markup=False)
        with Horizontal(id="upper"):
            with Panel(1, "presets", id="presets"):
                yield Input(placeholder="filter by name or tag", id="filter", compact=True)
                names = [Option(Text(name), id=name) for name in shipped_names()]
                yield OptionList(*names, id="preset-list", markup=False)
            yield Panel(2, "reading presets …", id="form")
            with Panel(None, "configuration", id="yaml"):
                yield Static(id="yaml-text", markup=False)
        yield Panel(3, "runs", id="runs")
        yield Static(
            "ltui needs a little more room: 60 columns and 12 lines.", id="tiny", markup=False
        )
        yield KeyLine(HINTS, id="keys")

    def on_mount(self) -> None:
        self.query_one("#preset-list").focus()
        self._fit(*self.app.size)
        # What follows imports and reads: the first picture stands before it begins.
        self.call_after_refresh(self._load_presets)

    def on_resize(self, event: events.Resize) -> None:
        self._fit(event.size.width, event.size.height)

    def _fit(self, width: int, height: int) -> None:
        tiny = width < 60 or height < 12
        for selector in ("#upper", "#runs"):
            self.query_one(selector).display = not tiny
        self.query_one("#tiny").display = tiny
        self.query_one("#yaml").display = width >= 140 and height >= 30
        self.set_class(width < 100, "-narrow")
        self.set_class(height < 30, "-low")

    @work(thread=True, group="presets", exit_on_error=False)
    def _load_presets(self) -> None:
        import os

        from ltui.app.machine import this_machine
        from ltui.app.screens import launch_form, runs_table  # noqa: F401 - off the UI thread
        from ltui.training.problem import ProblemError
        from ltui.training.run.preset_names import preset_names
        from ltui.training.run.presets import load_preset
        from ltui.widgets.sanitise import clean_name

        cwd = Path.cwd()
        loaded: dict[str, Preset] = {}
        broken: dict[str, str] = {}
        names = preset_names(cwd)
        for name in names:
            try:
                loaded[name] = load_preset(name, cwd)
            except ProblemError as error:
                broken[name] = str(error.problems[0])
        machine = this_machine(os.environ)
        if machine.gpus != 0 and self._gpus is None:
            from ltui.training.gpu.sampler import GpuSampler

            self._gpus = GpuSampler(period_s=GPUS_S)
        where = clean_name(f"{_short(cwd)} · trains with {_trainer(self.python)}")
        self._from_thread(self._show_presets, names, loaded, broken, machine, where)

    def _from_thread(self, function: object, *values: object) -> None:
        if not get_current_worker().is_cancelled and self.app.is_running:
            self.app.call_from_thread(function, *values)  # type: ignore[arg-type]

    async def _show_presets(
        self,
        names: tuple[str, ...],
        loaded: dict[str, Preset],
        broken: dict[str, str],
        machine: Machine,
        where: str,
    ) -> None:
        self.query_one("#title", Static).update(Text.assemble((" ltui", "bold"), f"   {where}"))
        from ltui.app.screens.launch_form import LaunchForm
        from ltui.app.screens.runs_table import RunsTable

        self.names, self.presets, self._broken, self.machine = names, loaded, broken, machine
        await self.query_one("#form").mount(LaunchForm(id="launch-form"))
        await self.query_one("#runs").mount(RunsTable(id="runs-table"))
        self._list_presets("")
        self._look_at_runs()
        self.set_interval(LOOK_S, self._look_at_runs)
        if self._gpus is not None:
            self._look_at_gpus()
            self.set_interval(LOOK_S, self._look_at_gpus)

    def _look_at_gpus(self) -> None:
        from ltui.app.gpu_choice import free_text

        form = self._form()
        if self._gpus is not None and form is not None:
            form.show_gpus(free_text(self._gpus.latest()))

    def on_unmount(self) -> None:
        if self._gpus is not None:
            self._gpus.stop()

    # -- presets -----------------------------------------------------------------------------------

    def _list_presets(self, wanted: str) -> None:
        from ltui.widgets.sanitise import clean_name

        options = self.query_one("#preset-list", OptionList)
        options.clear_options()
        for name in self.names:
            preset = self.presets.get(name)
            tags = ", ".join(preset.tags) if preset else "damaged"
            if preset is not None and not preset.shipped:
                tags = tags or "./"
            if wanted.lower() in f"{name} {tags}".lower():
                text = Text(clean_name(name))
                if not self.has_class("-narrow"):
                    first = clean_name(tags.split(",")[0])
                    if len(text) + len(first) < PRESET_CELLS:
                        text.append(first.rjust(PRESET_CELLS - len(text)), "dim")
                options.add_option(Option(text, id=name))
        if options.option_count:
            options.highlighted = 0
        else:
            options.add_option(Option(Text("none fits", "dim"), disabled=True))

    @on(OptionList.OptionHighlighted, "#preset-list")
    async def _choose(self, event: OptionList.OptionHighlighted) -> None:
        name = event.option_id
        if name is None or (self.preset is not None and self.preset.name == name):
            return
        if not self.names:
            return  # The presets behind the names are still being read.
        preset = self.presets.get(name)
        if preset is None:
            self.preset = self.result = None
            self.query_one("#form", Panel).say(name, "damaged")
            await self.query_one("#launch-form").remove_children()
            problem = self._broken.get(name, "")
            await self.query_one("#launch-form").mount(Static(Text(f"✗ {problem}", "bold")))
            return
        await self._show_preset(preset)

    async def _show_preset(self, preset: Preset) -> None:
        from ltui.app.screens.launch_form import LaunchForm

        self.preset, self.result = preset, None
        edited = preset is not self.presets.get(preset.name)
        title = f"{preset.title} (edited)" if edited else preset.title
        self.query_one("#form", Panel).say(title, " ".join(preset.tags))
        await self.query_one("#launch-form", LaunchForm).show(preset)
        self._check_form()

    @on(OptionList.OptionSelected, "#preset-list")
    def _preset_entered(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_launch()

    @on(Input.Changed, "#filter")
    def _filter_typed(self, event: Input.Changed) -> None:
        event.stop()
        self._list_presets(event.value)

    @on(Input.Submitted, "#filter")
    def _filter_entered(self, event: Input.Submitted) -> None:
        event.stop()
        self.query_one("#preset-list").focus()

    def action_filter(self) -> None:
        self.query_one("#presets").add_class("-filtering")
        self.query_one("#filter", Input).focus()

    # -- the form ----------------------------------------------------------------------------------

    def _field_changed(self) -> None:
        self.result = None
        if self._check_timer is not None:
            self._check_timer.stop()
        self._check_timer = self.set_timer(CHECK_AFTER_S, self._check_form)

    def on_launch_form_changed(self) -> None:
        self._field_changed()

    def on_launch_form_entered(self) -> None:
        self.action_launch()

    def _form(self) -> LaunchForm | None:
        from ltui.app.screens.launch_form import LaunchForm

        found = list(self.query(LaunchForm))
        return found[0] if found else None

    def _check_form(self) -> None:
        form = self._form()
        if form is not None and form.preset is not None and form.preset is self.preset:
            self._check(form.preset, form.texts(), form.start_from)

    @work(thread=True, exclusive=True, group="check", exit_on_error=False)
    def _check(self, preset: Preset, texts: dict[str, str], start_from: str) -> None:
        from ltui.training.problem import ProblemError
        from ltui.training.run.document import resolve, write_document
        from ltui.training.run.form import apply_form

        result = apply_form(preset, texts, self.machine)
        shown = write_document(resolve(result.document)[0])
        words, problems = "", list(result.problems)
        if start_from:
            # Local: what it takes to launch is loaded once it may be needed.
            from ltui.app.launching import start_words

            try:
                words = start_words(self.home, start_from)
            except ProblemError as error:
                problems += error.problems

        def checked() -> None:
            form = self._form()
            if form is None or form.preset is not preset:
                return
            if (form.texts(), form.start_from) == (texts, start_from):
                form.show_start(words)
                self._checked(form, replace(result, problems=tuple(problems)), shown)

        self._from_thread(checked)

    def _checked(self, form: LaunchForm, result: FormResult, shown: str) -> None:
        self.result = result
        form.show_problems(result.problems)
        self._shown_yaml = shown
        self.query_one("#yaml-text", Static).update(Text(shown))

    def action_edit(self) -> None:
        if self.preset is None or self.result is None:
            self._refuse("the configuration is not read yet")
            return
        from ltui.app.editing import edited, faults
        from ltui.app.screens.yaml_edit import YamlScreen

        preset, text = self.preset, self._shown_yaml

        async def taken(new: str | None) -> None:
            if new is not None and new != text:
                await self._show_preset(edited(preset, new))
                self.notify("the edited configuration is what Enter launches", timeout=4)

        title = f"{preset.name}: what Lightning is given"
        self.app.push_screen(
            YamlScreen(title, text, lambda t: faults(preset, t, self.machine)), taken
        )

    def action_check(self) -> None:
        form = self._form()
        if self.preset is None or form is None:
            self._refuse("choose a preset that can be read")
            return
        self.notify("checking with the real classes; that takes some seconds …", timeout=4)
        self._deep_check(self.preset, form.texts())

    @work(thread=True, exclusive=True, group="deep check", exit_on_error=False)
    def _deep_check(self, preset: Preset, texts: dict[str, str]) -> None:
        from ltui.app.deep_check import check_with_classes
        from ltui.app.prepare import prepare_preset
        from ltui.training.problem import ProblemError
        from ltui.training.run.form import apply_form

        result = apply_form(preset, texts, self.machine)
        try:
            if result.problems:
                raise ProblemError(*result.problems)
            check_with_classes(prepare_preset(preset, result.overrides, self.python))
        except ProblemError as error:
            self._from_thread(self._check_failed, preset, list(error.problems))
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            lines = [f"{type(error).__name__}: {error}"]
            self._from_thread(self._show_problems, "it could not be checked", lines)
        else:
            said = f"{preset.name}: nothing wrong, the real classes take it"
            self._from_thread(self._tell, said)

    def _check_failed(self, preset: Preset, problems: list[Problem]) -> None:
        self._beside_fields(preset, problems)
        self._show_problems(f"{preset.name} would not run", [str(p) for p in problems])

    def _tell(self, said: str) -> None:
        self.notify(said, markup=False)

    def _beside_fields(self, preset: Preset, problems: list[Problem]) -> None:
        form = self._form()
        if form is not None and form.preset is preset:
            form.show_problems(problems)

    # -- launching ---------------------------------------------------------------------------------

    def action_launch(self) -> None:
        if self.readonly:
            self._refuse(READONLY)
        elif self.preset is None:
            self._refuse("choose a preset that can be read")
        else:
            form = self._form()
            texts = form.texts() if form is not None else {}
            start_from = form.start_from if form is not None else ""
            self.notify(f"launching {self.preset.name} …", timeout=3, markup=False)
            self._launch(self.preset, texts, start_from)

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def _launch(self, preset: Preset, texts: dict[str, str], start_from: str) -> None:
        from ltui.app.launching import start_run
        from ltui.training.problem import ProblemError
        from ltui.training.run.form import apply_form

        result = apply_form(preset, texts, self.machine)
        if result.problems:
            self._from_thread(self._not_launched, preset, list(result.problems))
            return
        try:
            run_dir = start_run(self.home, preset, result.overrides, self.python, start_from)
        except ProblemError as error:
            self._from_thread(self._not_launched, preset, list(error.problems))
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            lines = [f"{type(error).__name__}: {error}"]
            self._from_thread(self._show_problems, "it was not launched", lines)
        else:
            self._from_thread(self._open, run_dir)

    def _not_launched(self, preset: Preset, problems: list[Problem]) -> None:
        self._beside_fields(preset, problems)
        self._show_problems(f"{preset.name} was not launched", [str(p) for p in problems])

    def _show_problems(self, title: str, lines: list[str]) -> None:
        self.app.push_screen(ProblemScreen(title, lines))

    def _refuse(self, why: str) -> None:
        self.notify(why, severity="warning", markup=False)

    # -- runs --------------------------------------------------------------------------------------

    @work(thread=True, exclusive=False, group="runs", exit_on_error=False)
    def _look_at_runs(self) -> None:
        from ltui.app.runs_list import RunsList
        from ltui.training.supervise.adopt import current_snapshot

        if self._looking:
            return
        self._looking = True
        try:
            if self._runs is None:
                self._runs = RunsList(self.home, current_snapshot)
            lines = self._runs.look()
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            self._from_thread(self._runs_failed, f"{type(error).__name__}: {error}")
        else:
            self._from_thread(self._show_runs, lines)
        finally:
            self._looking = False

    def _runs_failed(self, why: str) -> None:
        self.query_one("#runs", Panel).say("runs", f"can't be read: {why}")

    def _show_runs(self, lines: tuple[RunLine, ...]) -> None:
        from ltui.app.run_rows import run_row

        self.lines = {line.id: line for line in lines}
        table = self._table()
        now = time.time()
        table.set_rows([run_row(line, now) for line in lines])
        live = sum(line.live for line in lines)
        self.query_one("#runs", Panel).say("runs", f"{live} live of {len(lines)}" if lines else "")

    def _table(self) -> RunsTable:
        from ltui.app.screens.runs_table import RunsTable

        return self.query_one(RunsTable)

    def on_table_row_selected(self, event: object) -> None:
        line = self.lines.get(getattr(event, "key", ""))
        if line is not None:
            self._open(line.run_dir)

    def _open(self, run_dir: object) -> None:
        from ltui.app.screens.run import RunScreen

        self.app.push_screen(RunScreen(run_dir, readonly=self.readonly))  # type: ignore[arg-type]

    def _chosen_run(self) -> RunLine | None:
        return self.lines.get(self._table().cursor_key or "")

    def action_resume(self) -> None:
        line = self._chosen_run()
        if line is None:
            return
        from ltui.app.notices import refusal

        why = refusal(line.snapshot, "resume", readonly=self.readonly)
        if why is not None:
            self._refuse(why)
        else:
            self._resume(line)

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def _resume(self, line: RunLine) -> None:
        from ltui.training.problem import ProblemError
        from ltui.training.supervise.resume import resume

        try:
            resume(line.run_dir, spec=None, checkpoint=None)
        except ProblemError as error:
            lines = [str(p) for p in error.problems]
            self._from_thread(self._show_problems, f"{line.id} was not resumed", lines)
        else:
            self._from_thread(self._open, line.run_dir)

    def action_delete(self) -> None:
        line = self._chosen_run()
        if line is None:
            return
        if self.readonly:
            self._refuse(READONLY)
        elif line.live:
            self._refuse(f"{line.id} is alive: stop it first")
        else:

            def answered(yes: bool | None) -> None:
                if yes:
                    self._delete(line)

            question = f"Delete {line.id}? Its history, logs and checkpoints are lost."
            self.app.push_screen(ConfirmScreen(question, yes="delete it", no="keep it"), answered)

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def _delete(self, line: RunLine) -> None:
        from ltui.training.problem import ProblemError
        from ltui.training.supervise.resume import delete

        try:
            delete(line.run_dir)
        except ProblemError as error:
            lines = [str(p) for p in error.problems]
            self._from_thread(self._show_problems, f"{line.id} was not deleted", lines)
        else:
            self._from_thread(self._deleted, line.id)

    def _deleted(self, run_id: str) -> None:
        self.notify(f"deleted {run_id}", markup=False)
        self._look_at_runs()

    # -- moving ------------------------------------------------------------------------------------

    def action_go(self, where: str) -> None:
        for widget in self.query_one(f"#{where}").query("*"):
            if widget.focusable and widget.display and widget.id != "filter":
                widget.focus()
                return

    def action_leave(self) -> None:
        self.app.exit(message=self.farewell())

    def farewell(self) -> str | None:
        """Names what goes on."""
        live = [line.id for line in self.lines.values() if line.live]
        if not live:
            return None
        names = ", ".join(live[:4]) + (" and others" if len(live) > 4 else "")
        return f"{names} {'goes' if len(live) == 1 else 'go'} on; to watch: ltui attach"


def _short(path: Path) -> str:
    home = str(Path.home())
    text = str(path)
    return f"~{text[len(home) :]}" if text == home or text.startswith(f"{home}/") else text


def _trainer(python: str | None) -> str:
    """The interpreter that runs started here would use."""
    import os

    from ltui.app.interpreter import choose_python
    from ltui.training.problem import ProblemError

    try:
        return _short(Path(choose_python(python, os.environ)))
    except ProblemError as error:
        return str(error.problems[0])


HINTS = (
    KeyHint("⏎", "launch or open", "screen.launch", keep=True),
    KeyHint("e", "edit YAML", "screen.edit"),
    KeyHint("c", "check", "screen.check"),
    KeyHint("/", "filter", "screen.filter"),
    KeyHint("tab", "next", "app.focus_next"),
    KeyHint("r", "resume", "screen.resume"),
    KeyHint("del", "delete", "screen.delete"),
    KeyHint("?", "help", "app.help", keep=True),
    KeyHint("q", "leave", "screen.leave", keep=True),
    KeyHint("t", "theme", "app.choose_theme"),
)
