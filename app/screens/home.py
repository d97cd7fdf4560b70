"""The home screen: presets and their form on top, runs below. Slow work follows the first frame."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Input, Select, Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.keys.home_keys import KEYS, home_hints
from ltui.app.keys.key_table import bindings
from ltui.app.panels.form_panel import READONLY, FormPanel
from ltui.app.panels.panel import Panel
from ltui.app.panels.presets_panel import PresetEntry, PresetsPanel
from ltui.app.panels.runs_panel import RunsPanel
from ltui.app.panels.worker_calls import call_screen
from ltui.app.screens.confirm import ConfirmScreen, ProblemScreen
from ltui.training.config.preset_names import shipped_names
from ltui.widgets.sanitise import clean_name

if TYPE_CHECKING:
    from textual.widget import Widget

    from ltui.app.live.run_list import RunListEntry
    from ltui.training.config.device_selection import Machine
    from ltui.training.config.preset_form import FormResult
    from ltui.training.config.presets import Preset
    from ltui.training.gpu.sampler import GpuSampler
    from ltui.training.store.run_directory import RunDir

LOOK_S = 1.0
GPUS_S = 2.0
PAINTED_S = 1.0
"""Most seconds to wait until the form is painted, before more is read and imported."""


class HomeScreen(Screen[None]):
    """Presets to launch and runs to open."""

    SCOPE = "home"
    ABOUT = "Quitting ltui never stops a run."
    BINDINGS: ClassVar[list[BindingType]] = bindings("home", KEYS)

    def __init__(self, home: Path, *, readonly: bool = False, python: str | None = None) -> None:
        super().__init__()
        self.home, self.readonly, self.python = home, readonly, python
        self.presets: dict[str, Preset] = {}
        self._broken: dict[str, str] = {}
        self._opened: str | None = None
        self._gpus: GpuSampler | None = None

    # -- building ----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(Text(" ltui", "bold"), id="title", markup=False)
        with Horizontal(id="upper"):
            yield PresetsPanel(shipped_names(), id="presets")
            yield FormPanel(self.home, readonly=self.readonly, python=self.python, id="form")
            with Panel(None, "configuration", id="yaml"):
                yield Static(id="yaml-text", markup=False)
        yield RunsPanel(self.home, id="runs")
        yield Static(
            "ltui needs a little more room: 60 columns and 12 lines.", id="tiny", markup=False
        )
        yield KeyFooter(home_hints(None, in_runs=False), id="keys")

    def on_mount(self) -> None:
        self.query_one("#preset-list").focus()
        self._fit(*self.app.size)
        self.watch(self, "focused", self._focus_moved)
        # What follows imports and reads: the first frame is drawn before it begins.
        self.call_after_refresh(self._begin_loading)

    def on_resize(self, event: events.Resize) -> None:
        self._fit(event.size.width, event.size.height)

    def _fit(self, width: int, height: int) -> None:
        tiny = width < 60 or height < 12
        for selector in ("#upper", "#runs"):
            self.query_one(selector).display = not tiny
        self.query_one("#tiny").display = tiny
        self.query_one("#yaml").display = width >= 140 and height >= 30
        self.set_class(width < 100, "-narrow")
        self.set_class(width >= 150, "-wide")
        self.set_class(height < 30, "-low")

    def _focus_moved(self, focused: Widget | None) -> None:
        self.query_one(KeyFooter).show(home_hints(focused, in_runs=self._in_runs()))

    @property
    def presets_panel(self) -> PresetsPanel:
        return self.query_one(PresetsPanel)

    @property
    def form_panel(self) -> FormPanel:
        return self.query_one(FormPanel)

    @property
    def runs_panel(self) -> RunsPanel:
        return self.query_one(RunsPanel)

    @property
    def lines(self) -> dict[str, RunListEntry]:
        """Every run by its id."""
        return self.runs_panel.lines

    @property
    def preset(self) -> Preset | None:
        """The preset in the form, as edited."""
        return self.form_panel.preset

    @property
    def result(self) -> FormResult | None:
        """The form as last checked."""
        return self.form_panel.result

    # -- loading -----------------------------------------------------------------------------------

    def _begin_loading(self) -> None:
        self._load(self.presets_panel.highlighted_name)

    @work(thread=True, group="presets", exit_on_error=False)
    def _load(self, first: str | None) -> None:
        """Show the form of the preset ``first``, then what takes longer to read, part by part."""
        from ltui.app.panels import launch_form  # noqa: F401 - imported off the UI thread
        from ltui.training.config.presets import load_preset
        from ltui.training.problem import ProblemError

        cwd = Path.cwd()
        loaded: dict[str, Preset] = {}
        # The other preset files, whose problems are shown in the list, are read later.
        with contextlib.suppress(ProblemError):
            if first is not None:
                loaded[first] = load_preset(first, cwd)
        painted = threading.Event()
        call_screen(self, self._show_first, loaded.get(first or ""), painted)
        painted.wait(PAINTED_S)
        self._load_presets(cwd, loaded)
        self._load_machine(cwd)
        from ltui.app.panels import runs_table  # noqa: F401 - imported off the UI thread

        call_screen(self, self.runs_panel.start)

    async def _show_first(self, preset: Preset | None, painted: threading.Event) -> None:
        await self.form_panel.start()
        if preset is not None and self.presets_panel.highlighted_name == preset.name:
            await self.form_panel.show_preset(preset)
        self.call_after_refresh(painted.set)

    def _load_presets(self, cwd: Path, loaded: dict[str, Preset]) -> None:
        """In the worker's thread: read the presets that are not in ``loaded`` yet."""
        from ltui.training.config.preset_names import preset_names
        from ltui.training.config.presets import damaged_files, load_preset
        from ltui.training.problem import ProblemError

        broken = {name: str(problem) for name, problem in damaged_files(cwd).items()}
        names = (*broken, *preset_names(cwd))
        for name in names:
            try:
                if name not in loaded:
                    loaded[name] = load_preset(name, cwd)
            except ProblemError as error:
                broken[name] = str(error.problems[0])
        self.presets, self._broken = loaded, broken
        call_screen(self, self._show_presets, _entries(names, loaded, broken))

    async def _show_presets(self, entries: list[PresetEntry]) -> None:
        self.presets_panel.show(entries)
        await self._select(self.presets_panel.highlighted_name)

    def _load_machine(self, cwd: Path) -> None:
        """In the worker's thread: ask for GPUs and for the interpreter of runs."""
        import os

        from ltui.app.launch.local_machine import detect_machine
        from ltui.widgets.sanitise import clean_name

        machine = detect_machine(os.environ)
        if machine.gpus != 0 and self._gpus is None:
            from ltui.training.gpu.sampler import GpuSampler

            self._gpus = GpuSampler(period_s=GPUS_S)
        where = clean_name(f"{_short(cwd)} · {_python_words(self.python)}")
        call_screen(self, self._show_machine, machine, where)

    def _show_machine(self, machine: Machine, where: str) -> None:
        self.query_one("#title", Static).update(Text.assemble((" ltui", "bold"), f"   {where}"))
        self.form_panel.use_machine(machine)
        if self._gpus is not None:
            self._show_gpus()
            self.set_interval(LOOK_S, self._show_gpus)

    def _show_gpus(self) -> None:
        from ltui.app.presentation.free_gpus import free_gpus_text

        form = self.form_panel.form()
        if self._gpus is not None and form is not None:
            form.show_gpus(free_gpus_text(self._gpus.latest()))

    def on_unmount(self) -> None:
        if self._gpus is not None:
            self._gpus.stop()

    # -- presets -----------------------------------------------------------------------------------

    def palette_entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield what the palette can go to here: title, help, and what to do."""
        for name in self.presets_panel.names:
            select = partial(self.presets_panel.select, name)
            yield f"Go to preset {clean_name(name)}", "Show this preset in the form", select

    @on(PresetsPanel.Highlighted)
    async def _highlighted(self, event: PresetsPanel.Highlighted) -> None:
        event.stop()
        await self._select(event.name)

    async def _select(self, name: str | None) -> None:
        """Show the form of a preset, or why there is none."""
        panel = self.form_panel
        if not self.presets and not self._broken:
            return  # The presets behind the names are still being read.
        preset = self.presets.get(name or "")
        if preset is not None:
            if panel.preset is None or panel.preset.name != preset.name:
                await panel.show_preset(preset)
        elif name is None:
            text = Text("No preset matches the filter. Esc clears it.", "dim")
            await panel.show_nothing("no preset selected", text)
            self._show_yaml("")
        else:
            problem = self._broken.get(name, "")
            await panel.show_nothing(f"{name} (damaged)", Text(f"✗ {problem}", "bold"))
            self._show_yaml("")

    @on(PresetsPanel.Launch)
    def _preset_entered(self, event: PresetsPanel.Launch) -> None:
        event.stop()
        self.action_launch()

    @on(FormPanel.Checked)
    def _form_checked(self, event: FormPanel.Checked) -> None:
        event.stop()
        self._show_yaml(event.text)

    def _show_yaml(self, text: str) -> None:
        self.query_one("#yaml-text", Static).update(Text(text))

    def action_launch(self) -> None:
        self.form_panel.launch()

    def action_edit(self) -> None:
        self.form_panel.edit()

    def action_check(self) -> None:
        self.form_panel.check_with_classes()

    async def action_reset_form(self) -> None:
        preset = self.presets.get(self.preset.name) if self.preset is not None else None
        if preset is not None:
            await self.form_panel.reset(preset)

    # -- runs --------------------------------------------------------------------------------------

    @on(RunsPanel.Opened)
    def _run_opened(self, event: RunsPanel.Opened) -> None:
        event.stop()
        self._open(event.line.run_dir)

    @on(FormPanel.Launched)
    def _run_launched(self, event: FormPanel.Launched) -> None:
        event.stop()
        self._open(event.run_dir)

    def _open(self, run_dir: RunDir) -> None:
        from ltui.app.screens.run import RunScreen

        self._opened = run_dir.id
        self.app.push_screen(RunScreen(run_dir, readonly=self.readonly))

    def on_screen_resume(self) -> None:
        # Back from a run: the keys in the footer act on it, so the cursor is on its row.
        if self._opened is not None:
            run_id, self._opened = self._opened, None
            self.runs_panel.focus_run(run_id)

    def action_open_run(self) -> None:
        line = self.runs_panel.selected
        if line is not None:
            self._open(line.run_dir)

    def action_sort(self) -> None:
        self.runs_panel.next_order()

    def on_table_row_highlighted(self) -> None:
        # What can be done depends on the selected run.
        self.query_one(KeyFooter).refresh()

    def refusal_of(self, action: str) -> str | None:
        """Return why ``action`` can't be done now."""
        if action in ("launch", "resume", "rerun", "delete") and self.readonly:
            return READONLY
        if action not in ("resume", "rerun", "delete"):
            return None
        line = self.runs_panel.selected
        if line is None:
            return "There is no run."
        if action == "delete":
            return f"{line.id} is running. Stop it first." if line.live else None
        # Imported here: the first frame needs no run's state.
        from ltui.app.presentation.notifications import refusal

        return refusal(line.snapshot, action, readonly=self.readonly)

    def _allowed(self, action: str) -> RunListEntry | None:
        """The selected run if ``action`` can be done; else the reason is shown."""
        why = self.refusal_of(action)
        if why is not None:
            self.notify(why, severity="warning", markup=False)
            return None
        return self.runs_panel.selected

    def action_resume(self) -> None:
        line = self._allowed("resume")
        if line is not None:
            self._rerun(line, new_run=False)

    def action_rerun(self) -> None:
        line = self._allowed("rerun")
        if line is not None:
            self._rerun(line, new_run=True)

    def _rerun(self, line: RunListEntry, *, new_run: bool) -> None:
        # Imported here: the first frame starts nothing.
        from ltui.app.screens.rerun import RerunScreen

        def started(run_dir: RunDir | None) -> None:
            if run_dir is not None:
                self._open(run_dir)

        self.app.push_screen(RerunScreen(line.run_dir, new_run=new_run), started)

    def action_delete(self) -> None:
        line = self._allowed("delete")
        if line is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._delete(line)

        question = f"Delete {line.id}? Its history, logs and checkpoints are lost."
        self.app.push_screen(ConfirmScreen(question, yes="delete it", no="keep it"), answered)

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def _delete(self, line: RunListEntry) -> None:
        from ltui.training.lifecycle.resume_run import delete
        from ltui.training.problem import ProblemError

        try:
            delete(line.run_dir)
        except ProblemError as error:
            lines = [str(p) for p in error.problems]
            call_screen(self, self._show_problems, f"{line.id} was not deleted", lines)
        else:
            call_screen(self, self._deleted, line.id)

    def _deleted(self, run_id: str) -> None:
        self.notify(f"deleted {run_id}", markup=False)
        self.runs_panel.refresh_runs()

    def _show_problems(self, title: str, lines: list[str]) -> None:
        self.app.push_screen(ProblemScreen(title, lines))

    # -- moving ------------------------------------------------------------------------------------

    def _in_runs(self) -> bool:
        return self.focused is not None and self.runs_panel in self.focused.ancestors

    def action_filter(self) -> None:
        (self.runs_panel if self._in_runs() else self.presets_panel).open_filter()

    def action_back(self) -> None:
        """Clear the filter of the panel in focus; from a field, go to the presets."""
        panel = self.runs_panel if self._in_runs() else self.presets_panel
        in_form = isinstance(self.focused, (Input, Select)) and not self.focused.has_class("filter")
        if in_form:
            self.action_go("presets")
        elif panel.has_class("-filtering"):
            panel.clear_filter()
        else:
            self.action_go("presets")

    def action_keep_filter(self) -> None:
        self.action_go("runs" if self._in_runs() else "presets")

    def action_go(self, where: str) -> None:
        for widget in self.query_one(f"#{where}").query("*"):
            if widget.focusable and widget.display and not widget.has_class("filter"):
                widget.focus()
                return

    def action_leave(self) -> None:
        self.app.exit(message=self.farewell())

    def farewell(self) -> str | None:
        """Name the runs that keep running."""
        live = [line.id for line in self.lines.values() if line.live]
        if not live:
            return None
        names = ", ".join(live[:4]) + (" and others" if len(live) > 4 else "")
        verb = "keeps" if len(live) == 1 else "keep"
        return f"{names} {verb} running. To watch: ltui attach"


def _entries(
    names: Sequence[str], loaded: dict[str, Preset], broken: dict[str, str]
) -> list[PresetEntry]:
    """Files of the user first, then the shipped presets."""
    entries = [
        PresetEntry(
            name=name,
            tags=loaded[name].tags if name in loaded else (),
            own=name.startswith("./"),
            problem=broken.get(name),
        )
        for name in names
    ]
    return sorted(entries, key=lambda entry: (not entry.own, entry.own and entry.name))


def _short(path: Path) -> str:
    home = str(Path.home())
    text = str(path)
    return f"~{text[len(home) :]}" if text == home or text.startswith(f"{home}/") else text


def _python_words(python: str | None) -> str:
    """The interpreter of runs that are started here."""
    import os

    from ltui.app.launch.training_interpreter import choose_python
    from ltui.training.problem import ProblemError

    try:
        return f"Python: {_short(Path(choose_python(python, os.environ)))}"
    except ProblemError as error:
        return str(error.problems[0])
