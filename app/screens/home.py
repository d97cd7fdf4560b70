"""The home screen: presets and their form on top, runs below. Slow work follows the first frame."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widgets import Input, Select, Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.keys.home_keys import KEYS, home_hints
from ltui.app.panels.launch_panel import FormPanel
from ltui.app.panels.panel import Panel
from ltui.app.panels.preset_catalog import PresetCatalog
from ltui.app.panels.presets_panel import PresetEntry, PresetsPanel
from ltui.app.panels.runs_panel import RunsPanel
from ltui.app.panels.worker_results import call_screen
from ltui.app.screens.marked_runs import MarkedRunsScreen
from ltui.training.config.preset_discovery import shipped_names
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name

if TYPE_CHECKING:
    from textual.widget import Widget

    from ltui.training.config.device_selection import Machine
    from ltui.training.config.presets import Preset
    from ltui.training.gpu.sampler import GpuSampler

REFRESH_GPUS_S = 1.0
"""Seconds between two updates of the free GPUs on the screen."""
SAMPLE_GPUS_S = 2.0
"""Seconds between two readings of the GPUs."""
FIRST_PAINT_TIMEOUT_S = 1.0
"""Maximum seconds to wait until the form is painted, before more files and modules are read."""


class HomeScreen(MarkedRunsScreen):
    """Presets to launch and runs to open."""

    SCOPE = "home"
    ABOUT = "Quitting ltui never stops a run."
    BINDINGS: ClassVar[list[BindingType]] = bindings("home", KEYS)

    def __init__(self, home: Path, *, readonly: bool = False, preset: str | None = None) -> None:
        """``preset`` is selected once all presets have been read."""
        super().__init__(readonly=readonly)
        self._first_preset = preset
        self.home = home
        self._catalog = PresetCatalog()
        self._gpus: GpuSampler | None = None

    # -- building ----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(Text(" ltui", "bold"), id="title", markup=False)
        with Horizontal(id="upper"):
            yield PresetsPanel(shipped_names(), id="presets")
            yield FormPanel(self.home, readonly=self.readonly, id="form")
            with Panel(None, "configuration", id="yaml"):
                yield Static(id="yaml-text", markup=False)
        yield RunsPanel(self.home, id="runs")
        yield Static(
            "ltui needs a little more room: 60 columns and 12 lines.", id="tiny", markup=False
        )
        yield KeyFooter(home_hints(None, in_runs=False), id="keys")

    def on_mount(self) -> None:
        self.query_one("#preset-list").focus()
        self._fit_size(*self.app.size)
        self.watch(self, "focused", self._focus_moved)
        # Loading imports modules and reads files, so it starts after the first frame.
        self.call_after_refresh(lambda: self._load(self.presets_panel.highlighted_name))

    def on_resize(self, event: events.Resize) -> None:
        self._fit_size(event.size.width, event.size.height)

    def _fit_size(self, width: int, height: int) -> None:
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

    # -- loading -----------------------------------------------------------------------------------

    @work(thread=True, group="presets", exit_on_error=False)
    def _load(self, first_name: str | None) -> None:
        """Load the form of one preset, then all presets, then the machine, then the runs."""
        # Imported here, in the worker's thread: the first frame has no form.
        from ltui.app.panels import preset_fields  # noqa: F401

        folder = Path.cwd()
        first = self._catalog.read_first(first_name, folder)
        painted = threading.Event()
        call_screen(self, self._show_first, first, painted)
        painted.wait(FIRST_PAINT_TIMEOUT_S)
        call_screen(self, self._show_presets, self._catalog.read_all(folder, first))
        self._load_machine(folder)
        # Imported here, in the worker's thread: the first frame has no table.
        from ltui.app.panels import runs_table  # noqa: F401

        call_screen(self, self.runs_panel.start)

    async def _show_first(self, preset: Preset | None, painted: threading.Event) -> None:
        await self.form_panel.start()
        if preset is not None and self.presets_panel.highlighted_name == preset.name:
            await self.form_panel.show_preset(preset)
        self.call_after_refresh(painted.set)

    async def _show_presets(self, entries: list[PresetEntry]) -> None:
        self.presets_panel.show(entries)
        if self._first_preset is not None:
            self.select_preset(self._first_preset)
        await self._select(self.presets_panel.highlighted_name)

    def _load_machine(self, folder: Path) -> None:
        """Find the GPUs and the Python interpreter for runs, in the worker's thread."""
        # Imported here: finding out costs more time than the first frame.
        import os

        from ltui.app.launch.local_machine import detect_machine

        machine = detect_machine(os.environ)
        if machine.gpus != 0 and self._gpus is None:
            # Imported here: only machines with GPUs need it.
            from ltui.training.gpu.sampler import GpuSampler

            self._gpus = GpuSampler(period_s=SAMPLE_GPUS_S)
        subtitle = clean_name(f"{_short_path(folder)} · {_python_text()}")
        call_screen(self, self._show_machine, machine, subtitle)

    def _show_machine(self, machine: Machine, subtitle: str) -> None:
        title = Text.assemble((" ltui", "bold"), f"   {subtitle}")
        self.query_one("#title", Static).update(title)
        self.form_panel.use_machine(machine)
        if self._gpus is not None:
            self._show_gpus()
            self.set_interval(REFRESH_GPUS_S, self._show_gpus)

    def _show_gpus(self) -> None:
        # Imported here: only machines with GPUs need it.
        from ltui.app.presentation.free_gpus import free_gpus_text

        form = self.form_panel.form
        if self._gpus is not None and form is not None:
            form.show_gpus(free_gpus_text(self._gpus.latest()))

    def on_unmount(self) -> None:
        if self._gpus is not None:
            self._gpus.stop()

    # -- presets -----------------------------------------------------------------------------------

    def select_preset(self, name: str) -> None:
        """Move cursor and focus to a preset, if there is one of this name."""
        if name in self.presets_panel.names:
            self.presets_panel.select(name)

    @on(PresetsPanel.Highlighted)
    async def _highlighted(self, event: PresetsPanel.Highlighted) -> None:
        event.stop()
        await self._select(event.name)

    async def _select(self, name: str | None) -> None:
        """Show the form of a preset, or the reason why there is none."""
        panel = self.form_panel
        if not self._catalog.is_read:
            return
        preset = self._catalog.presets.get(name or "")
        if preset is not None:
            if panel.preset is None or panel.preset.name != preset.name:
                await panel.show_preset(preset)
        elif name is None:
            text = Text("No preset matches the filter. Esc clears it.", "dim")
            await panel.show_nothing("no preset selected", text)
            self._show_yaml("")
        else:
            problem = self._catalog.problems.get(name, "")
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
        shown = self.form_panel.preset
        preset = self._catalog.presets.get(shown.name) if shown is not None else None
        if preset is not None:
            await self.form_panel.reset(preset)

    # -- moving ------------------------------------------------------------------------------------

    def _in_runs(self) -> bool:
        return self.focused is not None and self.runs_panel in self.focused.ancestors

    def action_filter(self) -> None:
        (self.runs_panel if self._in_runs() else self.presets_panel).open_filter()

    def action_back(self) -> None:
        """Clear the filter of the panel in focus; from a field, go to the presets.

        From the runs it goes nowhere: the next Enter, meant to open a run, would launch a preset.
        """
        panel = self.runs_panel if self._in_runs() else self.presets_panel
        in_form = isinstance(self.focused, (Input, Select)) and not self.focused.has_class("filter")
        if panel.has_class("-filtering") and not in_form:
            panel.clear_filter()
        elif self._in_runs():
            self.notify("q quits ltui; training continues", timeout=2)
        else:
            self.action_go("presets")

    def action_keep_filter(self) -> None:
        self.action_go("runs" if self._in_runs() else "presets")

    def action_go(self, panel: str) -> None:
        for widget in self.query_one(f"#{panel}").query("*"):
            if widget.focusable and widget.display and not widget.has_class("filter"):
                widget.focus()
                return

    def action_leave(self) -> None:
        self.app.exit(message=self.farewell())

    def farewell(self) -> str | None:
        """Return the message to print when the dashboard is closed: the runs that keep running."""
        live = [line.id for line in self.runs_panel.lines.values() if line.live]
        if not live:
            return None
        names = ", ".join(live[:4]) + (" and others" if len(live) > 4 else "")
        verb = "keeps" if len(live) == 1 else "keep"
        return f"{names} {verb} running. To watch: ltui attach"


def _short_path(path: Path) -> str:
    home = str(Path.home())
    text = str(path)
    return f"~{text[len(home) :]}" if text == home or text.startswith(f"{home}/") else text


def _python_text() -> str:
    """Return the Python interpreter for runs that are started here, or why there is none."""
    # Imported here: finding the interpreter takes longer than the first frame.
    import os

    from ltui.app.launch.training_interpreter import choose_python
    from ltui.training.problem import ProblemError

    try:
        return f"Python: {_short_path(Path(choose_python(None, os.environ)))}"
    except ProblemError as error:
        return str(error.problems[0])
