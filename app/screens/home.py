"""The home screen: the list of runs, or presets and a form for a new run.

Without a run, presets and form fill the screen. Slow work follows the first frame.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widgets import Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.keys.ordered_input import OrderedKeysApp
from ltui.app.panels.launch_panel import READONLY, FormPanel
from ltui.app.panels.panel import SettingChosen, focus_in, panel_around
from ltui.app.panels.presets_panel import (
    OWN_SCRIPT,
    ConfigurationPanel,
    PresetCatalog,
    PresetEntry,
    PresetsPanel,
)
from ltui.app.panels.runs_panel import RunsPanel
from ltui.app.screens.dialog import call_screen
from ltui.app.screens.home_layout import (
    FORM,
    KEYS,
    PANELS,
    PRESETS,
    RUNS,
    SIDE_WIDTH,
    HomeLayout,
    home_hints,
)
from ltui.app.screens.marked_runs import MarkedRunsScreen
from ltui.app.settings import settings_of
from ltui.training.config.preset_discovery import shipped_names
from ltui.training.store.run_directory import has_runs, paths_in
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
"""Maximum seconds to wait until the runs or the form are painted, before more is read."""
SIDE_PRESETS = "layout.presets"
"""The setting whether presets stand beside the runs."""
NOT_HELD = ("ctrl+q", "ctrl+c")
"""Keys that are not held back while the list of runs is being read."""


class HomeScreen(MarkedRunsScreen):
    """Runs to open, and presets to launch."""

    ABOUT = "Quitting ltui never stops a run."
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = bindings("home", KEYS)

    def __init__(self, home: Path, *, readonly: bool = False, preset: str | None = None) -> None:
        """``preset`` is selected once all presets have been read."""
        super().__init__(readonly=readonly)
        self._first_preset = preset
        self.home = home
        self.home_layout = HomeLayout(has_runs=has_runs(home), new_run=preset is not None)
        self._listed = threading.Event()
        """Set when the list of runs is on the screen."""
        self._catalog = PresetCatalog()
        self._gpus: GpuSampler | None = None
        self._focused_panel: str | None = None
        """Name of the panel that had the focus last."""

    # -- building ----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(Text(" ltui", "bold"), id="title", markup=False)
        with Horizontal(id="panels"):
            yield RunsPanel(self.home, id=RUNS)
            yield PresetsPanel(shipped_names(), id=PRESETS)
            yield FormPanel(self.home, readonly=self.readonly, id=FORM)
            yield ConfigurationPanel()
        yield Static(f" Your own script:  {OWN_SCRIPT}", id="own-script", markup=False)
        yield Static(
            "ltui needs a little more room: 60 columns and 12 lines.", id="tiny", markup=False
        )
        yield KeyFooter(id="keys")

    def on_mount(self) -> None:
        side = settings_of(self.app).value(SIDE_PRESETS) is not False
        self.home_layout = replace(self.home_layout, side_presets=side)
        self._fit_size(*self.app.size)
        self.watch(self, "focused", self._focus_moved)
        if not self.home_layout.shows_runs:
            self.query_one("#preset-list").focus()
        elif isinstance(self.app, OrderedKeysApp):
            # What is typed before the runs are listed is meant for them.
            self.app.hold_keys(NOT_HELD)
        # Loading imports modules and reads files, so it starts after the first frame.
        self.call_after_refresh(lambda: self._load(self.presets_panel.highlighted_name))

    def on_resize(self, event: events.Resize) -> None:
        # The first resize may come before there are any panels.
        if self.query("#keys"):
            self._fit_size(event.size.width, event.size.height)

    def _fit_size(self, width: int, height: int) -> None:
        self.set_class(width < 70, "-slim")
        self.set_class(width < 100, "-narrow")
        self.set_class(width >= 150, "-wide")
        self.set_class(height < 30, "-low")
        self._use_layout(replace(self.home_layout, width=width, height=height))

    def _use_layout(self, layout: HomeLayout) -> None:
        """Show the panels of a layout. The focus leaves a panel that is hidden."""
        self.home_layout = layout
        visible = layout.visible()
        for name in PANELS:
            self.query_one(f"#{name}").display = name in visible
        self.query_one("#tiny").display = layout.tiny
        self.query_one("#own-script").display = bool(visible) and not layout.shows_runs
        self.set_class(layout.shows_runs, "-runs")
        if self.focused is not None and visible and self._panel_in_focus() not in visible:
            self._focus_in(RUNS if layout.shows_runs else PRESETS)
        self._focus_moved(self.focused)

    def _panel_in_focus(self) -> str | None:
        return panel_around(self.focused, PANELS)

    def _focus_in(self, panel: str) -> None:
        """Move the focus into a visible panel."""
        if not focus_in(self.query_one(f"#{panel}"), with_filter=False):
            self.set_focus(None)

    def _focus_moved(self, focused: Widget | None) -> None:
        panel = self._panel_in_focus()
        if panel == FORM != self._focused_panel:
            self.form_panel.focus_entered()
        self._focused_panel = panel
        self._show_hints(focused)

    def _show_hints(self, focused: Widget | None) -> None:
        hints = home_hints(
            focused,
            in_runs=self._in_runs(),
            has_runs=self.home_layout.has_runs,
            has_sweeps=bool(paths_in(self.home / "sweeps")),
        )
        self.query_one(KeyFooter).show(hints)

    @property
    def presets_panel(self) -> PresetsPanel:
        return self.query_one(PresetsPanel)

    @property
    def form_panel(self) -> FormPanel:
        return self.query_one(FormPanel)

    # -- loading -----------------------------------------------------------------------------------

    @work(thread=True, group="presets")
    def _load(self, first_name: str | None) -> None:
        """Load what the screen shows first: the runs, or the form of one preset. Then load all
        presets, the machine, and the other of them."""
        runs_first = self.home_layout.shows_runs
        if runs_first:
            self._load_runs()
            self._listed.wait(FIRST_PAINT_TIMEOUT_S)
        # Imported here, in the worker's thread: the first frame has no form.
        from ltui.app.panels import form_fields  # noqa: F401

        folder = Path.cwd()
        first = self._catalog.read_first(first_name, folder)
        painted = threading.Event()
        call_screen(self, self._show_first, first, painted)
        painted.wait(FIRST_PAINT_TIMEOUT_S)
        call_screen(self, self._show_presets, self._catalog.read_all(folder, first))
        self._load_machine(folder)
        if not runs_first:
            self._load_runs()

    def _load_runs(self) -> None:
        # Imported here, in the worker's thread: the first frame has no table.
        from ltui.app.panels import runs_table  # noqa: F401

        call_screen(self, self.runs_panel.start)

    @on(RunsPanel.Listed)
    def _runs_listed(self, event: RunsPanel.Listed) -> None:
        event.stop()
        layout = self.home_layout
        if layout.has_runs != bool(self.runs_panel.lines):
            # A run that was started elsewhere takes no form away.
            layout = replace(layout, has_runs=not layout.has_runs, new_run=not layout.has_runs)
            self._use_layout(layout)
        else:
            # The trials of a sweep are runs: it may be the first one.
            self._show_hints(self.focused)
        if self.focused is None:
            self._focus_in(RUNS if layout.shows_runs else PRESETS)
        if not self._listed.is_set():
            self.call_after_refresh(self._listed.set)
            if isinstance(self.app, OrderedKeysApp):
                self.app.release_keys()

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
        from ltui.app.launch.launch_text import free_gpus_text

        form = self.form_panel.form
        if self._gpus is not None and form is not None:
            form.show_gpus(free_gpus_text(self._gpus.latest()))

    def on_unmount(self) -> None:
        if self._gpus is not None:
            self._gpus.stop()

    # -- presets -----------------------------------------------------------------------------------

    def select_preset(self, name: str) -> None:
        """Move cursor and focus to a preset, if there is one of this name, beside its form."""
        if name in self.presets_panel.names:
            self._use_layout(replace(self.home_layout, new_run=True, zoomed=""))
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
            self.query_one(ConfigurationPanel).show("")
        else:
            problem = self._catalog.problems.get(name, "")
            await panel.show_nothing(f"{name} (damaged)", Text(f"✗ {problem}", "bold"))
            self.query_one(ConfigurationPanel).show("")

    @on(PresetsPanel.Entered)
    def _preset_entered(self, event: PresetsPanel.Entered) -> None:
        event.stop()
        self._open_form()

    def _open_form(self) -> None:
        """Show the form, with the focus on the line that starts the run."""
        if self.home_layout.shows_runs:
            self._use_layout(self.home_layout.showing(FORM))
        elif FORM not in self.home_layout.visible():
            self._use_layout(replace(self.home_layout, zoomed=""))
        self.form_panel.focus_launch_line()

    @on(FormPanel.Checked)
    def _form_checked(self, event: FormPanel.Checked) -> None:
        event.stop()
        self.query_one(ConfigurationPanel).show(event.text, event.changed)

    def action_launch(self) -> None:
        """Start the run of the form if it has the focus; from elsewhere, go to the form."""
        if self._panel_in_focus() == FORM:
            self.form_panel.launch()
        elif not self.home_layout.shows_runs:
            self._open_form()

    def action_edit(self) -> None:
        self.form_panel.edit()

    def action_check(self) -> None:
        self.form_panel.check_with_classes()

    async def action_reset_form(self) -> None:
        """Set the form back; of the list of runs, the panels."""
        if self.home_layout.shows_runs:
            self._show_side_presets(shown=True)
            return
        shown = self.form_panel.preset
        preset = self._catalog.presets.get(shown.name) if shown is not None else None
        if preset is not None:
            await self.form_panel.reset(preset)

    # -- moving ------------------------------------------------------------------------------------

    def _in_runs(self) -> bool:
        if self.focused is None:
            return self.home_layout.shows_runs
        return self._panel_in_focus() == RUNS

    def action_filter(self) -> None:
        (self.runs_panel if self._in_runs() else self.presets_panel).open_filter()

    def action_back(self) -> None:
        """Clear the filter of the panel in focus; from a field, go to the presets; from there, to
        the runs.

        From the runs it goes nowhere: the next Enter, meant to open a run, would launch a preset.
        """
        panel = self.runs_panel if self._in_runs() else self.presets_panel
        in_form = self._panel_in_focus() == FORM
        if panel.has_class("-filtering") and not in_form:
            panel.clear_filter()
        elif self._in_runs():
            self.notify("q quits ltui; training continues", timeout=2)
        elif self.home_layout.zoomed:
            self._use_layout(replace(self.home_layout, zoomed=""))
        elif in_form:
            self.action_go(PRESETS)
        elif self.home_layout.has_runs:
            self.action_go(RUNS)

    def action_keep_filter(self) -> None:
        self.action_go(RUNS if self._in_runs() else PRESETS)

    def action_go(self, panel: str) -> None:
        if panel == RUNS and not self.home_layout.has_runs:
            self.notify("There is no run yet.", timeout=3)
            return
        self._use_layout(self.home_layout.showing(panel))
        self._focus_in(panel)

    def action_new_run(self) -> None:
        """Show the presets with the form, to choose one."""
        if self.readonly:
            self.form_panel.refuse(READONLY)
            return
        self._use_layout(replace(self.home_layout, new_run=True, zoomed=""))
        self._focus_in(PRESETS)

    def action_zoom(self) -> None:
        panel = self._panel_in_focus()
        if panel != RUNS:
            self._use_layout(self.home_layout.maximised(panel or PRESETS))
        elif self.home_layout.width < SIDE_WIDTH:
            self.notify("The runs fill the screen already.", timeout=3)
        else:
            self._show_side_presets(shown=not self.home_layout.side_presets)

    def _show_side_presets(self, *, shown: bool) -> None:
        self._use_layout(replace(self.home_layout, side_presets=shown))
        self.post_message(SettingChosen(SIDE_PRESETS, shown))

    @on(FormPanel.Launched)
    @on(FormPanel.Queued)
    def _show_runs(self) -> None:
        # When the screen of the new run is closed, the list has it.
        self._use_layout(replace(self.home_layout, has_runs=True, new_run=False, zoomed=""))

    def on_screen_resume(self) -> None:
        if self._opened_run is not None and self.home_layout.has_runs:
            self._use_layout(self.home_layout.showing(RUNS))

    def action_sweeps(self) -> None:
        # Imported here: the first frame shows no sweep.
        from ltui.app.screens.sweep import show_last_sweep

        show_last_sweep(self, self.home, readonly=self.readonly)

    def action_leave(self) -> None:
        self.app.exit(message=self.farewell())


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
