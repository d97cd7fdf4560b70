"""The Textual application: themes, the command palette, and which screen stands first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ltui.widgets.palette import THEMES

if TYPE_CHECKING:
    from ltui.training.store.home import RunDir

OTHER_THEMES = ("textual-ansi", "nord", "gruvbox", "solarized-light")
"""Of Textual's own, after ltui's; the first keeps to the terminal's 16 colours."""


class LtuiApp(App[None]):
    """``run`` given: its screen alone; else home, from which runs are opened."""

    CSS_PATH = Path(__file__).with_name("ltui.tcss")
    TITLE = "ltui"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "next_theme", "theme", id="theme", show=False, tooltip="Next colour theme"),
        Binding(
            "question_mark",
            "help",
            "help",
            id="help",
            key_display="?",
            tooltip="Every key of this screen",
        ),
        Binding(
            "ctrl+q,ctrl+c",
            "leave",
            "quit",
            id="quit",
            show=False,
            priority=True,
            tooltip="Leave ltui; runs go on",
        ),
    ]

    def __init__(
        self,
        home: Path,
        *,
        run: RunDir | None = None,
        readonly: bool = False,
        python: str | None = None,
    ) -> None:
        super().__init__()
        self.home, self.first_run = home, run
        self.readonly, self.python = readonly, python
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name
        # In tables k would be "up"; on a run's screen it kills. A key means the same everywhere.
        self.set_keymap({"table.up": "up", "table.down": "down"})

    def get_default_screen(self) -> Screen[None]:
        # Imported here: neither screen pays for what the other needs.
        if self.first_run is not None:
            from ltui.app.screens.run import RunScreen

            return RunScreen(self.first_run, readonly=self.readonly, alone=True)
        from ltui.app.screens.home import HomeScreen

        return HomeScreen(self.home, readonly=self.readonly, python=self.python)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette offers what the keys do."""
        for active in screen.active_bindings.values():
            binding = active.binding
            if binding.description and binding.id and active.enabled:
                yield SystemCommand(
                    binding.description[:1].upper() + binding.description[1:],
                    binding.tooltip or binding.description,
                    lambda action=binding.action, node=active.node: self.call_later(
                        self.run_action, action, default_namespace=node
                    ),
                )

    def action_next_theme(self) -> None:
        names = (*(theme.name for theme in THEMES), *OTHER_THEMES)
        place = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(place + 1) % len(names)]
        self.notify(f"theme {self.theme}", timeout=2)

    def action_help(self) -> None:
        from ltui.app.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen.of(self.screen))

    def action_leave(self) -> None:
        """Leave at once, from anywhere; a run's screen says that its run goes on."""
        farewell = getattr(self.screen, "farewell", None)
        self.exit(message=farewell() if farewell is not None else None)
