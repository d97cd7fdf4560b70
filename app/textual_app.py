"""The Textual application: themes, the command palette, and the first screen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ltui.app.keys.key_queue import OrderedKeysApp
from ltui.app.preferences import write_preference
from ltui.app.theme_choice import first_theme, theme_names
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import RunDir, list_runs
from ltui.widgets.palette import THEMES

if TYPE_CHECKING:
    from ltui.widgets.charts.chart import Chart

MAX_PALETTE_RUNS = 50
"""Number of runs that the command palette offers, newest first."""


class LtuiApp(OrderedKeysApp):
    """The dashboard. With ``run`` it shows only that run; otherwise it opens the home screen."""

    CSS_PATH = Path(__file__).with_name("ltui.tcss")
    TITLE = "ltui"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-high")]  # noqa: RUF012 - as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "t",
            "choose_theme",
            "theme",
            id="theme",
            show=False,
            tooltip="Choose a colour theme from a list",
        ),
        Binding(
            "question_mark",
            "help",
            "help",
            id="help",
            key_display="?",
            tooltip="List every key of this screen",
        ),
        Binding(
            "ctrl+q,ctrl+c",
            "leave",
            "quit",
            id="quit",
            show=False,
            priority=True,
            tooltip="Quit ltui (training continues)",
        ),
    ]

    def __init__(
        self,
        home: Path,
        *,
        run: RunDir | None = None,
        first: Callable[[], Screen[None]] | None = None,
        readonly: bool = False,
    ) -> None:
        """``first`` makes the first screen if it is neither the home screen nor that of a run."""
        super().__init__()
        self.home, self.first_run, self.readonly = home, run, readonly
        self._first = first
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = first_theme(home, self.available_themes, os.environ)

    def get_default_screen(self) -> Screen[None]:
        if self._first is not None:
            return self._first()
        # Imported here, so that neither screen loads what only the other one needs.
        if self.first_run is not None:
            from ltui.app.screens.run import RunScreen

            return RunScreen(self.first_run, readonly=self.readonly, alone=True)
        from ltui.app.screens.home import HomeScreen

        return HomeScreen(self.home, readonly=self.readonly)

    def refresh_css(self, animate: bool = True) -> None:
        """Apply the theme. Before the first screen exists, leave parsing the styles to that
        screen."""
        if self.screen_stack:
            super().refresh_css(animate)
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the palette's commands: the screen's key bindings and the runs to open."""
        from ltui.app.keys.command_palette import commands

        yield from commands(screen)
        if getattr(screen, "SCOPE", None) in ("home", "run"):
            shown = getattr(screen, "run_dir", None)
            for run_dir in list_runs(self.home)[:MAX_PALETTE_RUNS]:
                if run_dir != shown:
                    open_it = partial(self.open_run, run_dir)
                    yield SystemCommand(f"Open run {run_dir.id}", "Go to this run", open_it)
                if shown is not None:
                    compare = partial(self.compare_runs, [shown, run_dir])
                    about = "Show the curves of both runs over one another, and what differs"
                    yield SystemCommand(f"Compare with run {run_dir.id}", about, compare)

    def open_run(self, run_dir: RunDir) -> None:
        """Open a run. A run that was opened before from the first screen is replaced."""
        from ltui.app.screens.run import RunScreen

        screen = RunScreen(run_dir, readonly=self.readonly)
        if isinstance(self.screen, RunScreen) and len(self.screen_stack) > 1:
            self.switch_screen(screen)
        else:
            self.push_screen(screen)

    def compare_runs(self, run_dirs: Sequence[RunDir]) -> None:
        """Open the comparison of two runs or more."""
        from ltui.app.screens.compare import CompareScreen

        self.push_screen(CompareScreen(run_dirs))

    def action_choose_theme(self) -> None:
        from ltui.app.screens.theme_list import ThemeScreen

        if not isinstance(self.screen, ThemeScreen):
            self.push_screen(ThemeScreen(theme_names(self.available_themes)), self._use_theme)

    def _use_theme(self, name: str | None) -> None:
        """Apply the chosen theme and store it for later starts."""
        if name is None:
            return
        self.theme = name
        try:
            write_preference(self.home, "theme", name)
        except OSError as error:
            reason = error.strerror or str(error)
            self.notify(
                f"The theme can't be remembered: {reason}", severity="warning", markup=False
            )

    def action_help(self) -> None:
        from ltui.app.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen.of(self.screen))

    def on_chart_export_requested(self, message: Chart.ExportRequested) -> None:
        """Copy or save a chart of any screen."""
        message.stop()
        if message.form == "text":
            self.copy_to_clipboard(message.chart.plain_text())
            self.notify("Copied to the clipboard, if your terminal allows it.")
            return
        # Imported here: NumPy and drawing are not needed until a chart is saved.
        from ltui.app.save_chart import save_chart

        source = str(getattr(message.chart.screen, "chart_source", ""))
        try:
            path = save_chart(message.chart, message.form, Path.cwd(), source)
        except ProblemError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"Saved {path}", markup=False)

    def action_leave(self) -> None:
        """Quit at once from any screen. The screen of a run prints that its run keeps running."""
        farewell = getattr(self.screen, "farewell", None)
        self.exit(message=farewell() if farewell is not None else None)
