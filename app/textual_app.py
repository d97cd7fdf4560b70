"""The Textual application: themes, the command palette, and the first screen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ltui.app.keys.key_queue import OrderedKeysApp
from ltui.app.preferences import write_preference
from ltui.app.theme_choice import first_theme, theme_names
from ltui.training.store.run_directory import RunDir, list_runs
from ltui.widgets.palette import THEMES

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

    def __init__(self, home: Path, *, run: RunDir | None = None, readonly: bool = False) -> None:
        super().__init__()
        self.home, self.first_run, self.readonly = home, run, readonly
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = first_theme(home, self.available_themes, os.environ)

    def get_default_screen(self) -> Screen[None]:
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

    def open_run(self, run_dir: RunDir) -> None:
        """Open a run. A run that was opened before from the first screen is replaced."""
        from ltui.app.screens.run import RunScreen

        screen = RunScreen(run_dir, readonly=self.readonly)
        if isinstance(self.screen, RunScreen) and len(self.screen_stack) > 1:
            self.switch_screen(screen)
        else:
            self.push_screen(screen)

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

    def action_leave(self) -> None:
        """Quit at once from any screen. The screen of a run prints that its run keeps running."""
        farewell = getattr(self.screen, "farewell", None)
        self.exit(message=farewell() if farewell is not None else None)
