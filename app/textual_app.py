"""The Textual application: themes, the command palette, and the first screen."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events, work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ltui.app.keys.ordered_input import OrderedKeysApp
from ltui.app.settings import Settings, read_user_config
from ltui.app.user_config import UserConfig
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.run_directory import RunDir, open_private_log
from ltui.widgets.make_bindings import bindings
from ltui.widgets.palette import LTUI_DARK, LTUI_LIGHT, THEMES
from ltui.widgets.sanitise import clean_line

if TYPE_CHECKING:
    from textual.command import Provider

    from ltui.app.panels.panel import SettingChosen
    from ltui.app.screens.run import RunScreen
    from ltui.widgets.charts.chart import Chart

LIGHT_BACKGROUNDS = frozenset({"7", *(str(number) for number in range(9, 16))})
"""Numbers of the light colours among the terminal's 16: white, and all bright ones except grey."""


def theme_names(available: Iterable[str]) -> list[str]:
    """Return ltui's own themes, then the other ``available`` ones in alphabetical order."""
    ltui_themes = [theme.name for theme in THEMES]
    return ltui_themes + sorted(name for name in available if name not in ltui_themes)


def first_theme(settings: Settings, available: Collection[str], environ: Mapping[str, str]) -> str:
    """Return the chosen theme, or the one that suits the terminal's background."""
    chosen = settings.value("theme")
    if isinstance(chosen, str) and chosen in available:
        return chosen
    return LTUI_LIGHT.name if has_light_background(environ) else LTUI_DARK.name


def has_light_background(environ: Mapping[str, str]) -> bool:
    """Return whether ``COLORFGBG`` (``15;0``, ``0;default;15``) names a light background."""
    return environ.get("COLORFGBG", "").rpartition(";")[2].strip() in LIGHT_BACKGROUNDS


def _places_provider() -> type[Provider]:
    # Imported here: the first screen has no palette.
    from ltui.app.screens.palette import PlacesProvider

    return PlacesProvider


class LtuiApp(OrderedKeysApp):
    """The dashboard. With ``run`` it shows only that run; otherwise it opens the home screen."""

    CSS_PATH = Path(__file__).with_name("ltui.tcss")
    TITLE = "ltui"
    COMMANDS = App.COMMANDS | {_places_provider}
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-high")]  # noqa: RUF012 - as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        # In a text field a question mark is typed.
        *bindings(
            "",
            """
            t                | choose_theme | theme | Choose a colour theme from a list
            question_mark,f1 | help         | help  | List every key of this screen
            """,
        ),
        *bindings("", "ctrl+q | leave | quit | Quit ltui (training continues)", priority=True),
        # Without an id, because it can't be changed. The help lists it (footer.py).
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        *bindings(
            "",
            "ctrl+p | command_palette | palette | "
            "Find an action, a run, a metric or a preset by its name",
            priority=True,
        ),
    ]

    def __init__(
        self,
        home: Path,
        *,
        run: RunDir | None = None,
        first: Callable[[], Screen[None]] | None = None,
        readonly: bool = False,
        at: str | None = None,
    ) -> None:
        """``first`` makes the first screen if it is neither the home screen nor that of a run.
        ``at``: the moment of the run that is shown first, as a person writes it."""
        super().__init__()
        self.home, self.first_run, self.readonly = home, run, readonly
        self._first, self._at = first, at
        for theme in THEMES:
            self.register_theme(theme)
        config = read_user_config()
        self.settings = Settings(home, config)
        self.theme = first_theme(self.settings, self.available_themes, os.environ)
        self.own_keys: dict[str, tuple[str, ...]] = {}
        """Keys of the configuration file by the ids of bindings, with Textual's names."""
        self._config_problems = list(config.problems)
        self._crash: str | None = None
        """What to print after an unexpected error."""
        self._shown_reasons: set[str] = set()
        """Why choices are not remembered. Each reason is shown once."""
        if config.values or config.keys:
            self._use_config(config)

    def _use_config(self, config: UserConfig) -> None:
        # Imported here: most users have no configuration file.
        from ltui.app.config_file import locate, theme_faults
        from ltui.app.keys.own_keys import usable_keys

        self.own_keys, faults = usable_keys(config.keys)
        self.set_keymap({name: ",".join(keys) for name, keys in self.own_keys.items()})
        faults += theme_faults(config, self.available_themes)
        self._config_problems += locate(config, faults)

    def on_mount(self) -> None:
        if self.settings.config.keys:
            self._check_keys()
        else:
            self._show_config_problems(self._config_problems)

    @work(thread=True, group="keys")
    def _check_keys(self) -> None:
        """Check the actions of the user's keys, which needs the bindings of every screen, and
        report every problem of the configuration file in one notice."""
        # Imported here, in the worker's thread: most users have no keys of their own.
        from ltui.app.config_file import locate
        from ltui.app.keys.own_keys import action_faults, default_keys
        from ltui.app.screens.dialog import call_screen

        config = self.settings.config
        faults = action_faults(config.keys, self.own_keys, default_keys(LtuiApp))
        problems = [*self._config_problems, *locate(config, faults)]
        call_screen(self, self._show_config_problems, problems)

    def _show_config_problems(self, problems: Sequence[Problem]) -> None:
        if problems:
            more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
            message = f"{problems[0]}{more} `ltui config --check` lists what is ignored."
            self.notify(clean_line(message), severity="warning", timeout=12, markup=False)

    def get_default_screen(self) -> Screen[None]:
        if self._first is not None:
            return self._first()
        # Imported here, so that neither screen loads what only the other one needs.
        if self.first_run is not None:
            from ltui.app.screens.run import RunScreen

            return RunScreen(self.first_run, readonly=self.readonly, alone=True, at=self._at)
        from ltui.app.screens.home import HomeScreen

        return HomeScreen(self.home, readonly=self.readonly)

    def refresh_css(self, animate: bool = True) -> None:
        """Apply the theme. Before the first screen exists, leave parsing the styles to that
        screen."""
        if self.screen_stack:
            super().refresh_css(animate)
            # Textual repaints only widgets whose own styles have changed, but charts and tables
            # draw with other colours of the theme, too.
            for widget in self.screen.query("*"):
                widget.refresh()
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the palette's commands for the screen: its key bindings and its metrics."""
        from ltui.app.screens.palette import commands

        yield from commands(screen)

    def open_run(self, run_dir: RunDir) -> None:
        """Open a run. A run that was opened before from the first screen is replaced."""
        from ltui.app.screens.run import RunScreen

        screen = RunScreen(run_dir, readonly=self.readonly)
        if isinstance(self.screen, RunScreen):
            self.screen.replace_by(screen)
        else:
            self.push_screen(screen)

    def open_preset(self, name: str) -> None:
        """Show a preset on the home screen: the one below this screen, or a new one."""
        from ltui.app.screens.home import HomeScreen

        if not any(isinstance(screen, HomeScreen) for screen in self.screen_stack):
            self.push_screen(HomeScreen(self.home, readonly=self.readonly, preset=name))
            return
        while not isinstance(self.screen, HomeScreen):
            self.pop_screen()
        self.screen.select_preset(name)

    def compare_runs(self, run_dirs: Sequence[RunDir]) -> None:
        """Open the comparison of two runs or more."""
        from ltui.app.screens.compare import CompareScreen

        self.push_screen(CompareScreen(run_dirs))

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Paste) and not event.is_forwarded:
            self._name_lost_lines(event.text)
        await super().on_event(event)

    def _name_lost_lines(self, pasted: str) -> None:
        """Say that a field of one line takes only the first line of a pasted text."""
        # Imported here: few people paste.
        from textual.widgets import Input

        lines = len(pasted.splitlines())
        if lines > 1 and isinstance(self.focused, Input):
            message = f"Only the first of {lines} pasted lines was taken: this field has one line."
            self.notify(message, severity="warning")

    def notify(self, message: str, **options: Any) -> None:
        """Show a notice, unless the same one is shown already."""
        if all(message != shown.message for shown in self._notifications):
            super().notify(message, **options)

    def on_run_screen_happened(self, message: RunScreen.Happened) -> None:
        """Show and sound an event of a run as the settings say."""
        message.stop()
        problem = message.severity != "information"
        allowed = {"all", "problems"} if problem else {"all"}
        if self.settings.value("notifications.show") in allowed:
            seconds = self.settings.value("notifications.seconds")
            self.notify(message.sentence, severity=message.severity, timeout=seconds, markup=False)
        if self.settings.value("notifications.bell") in allowed:
            self.bell()

    def on_setting_chosen(self, message: SettingChosen) -> None:
        message.stop()
        self.remember(message.setting, message.value)

    def action_choose_theme(self) -> None:
        from ltui.app.screens.palette import ThemeScreen

        if not isinstance(self.screen, ThemeScreen):
            self.push_screen(ThemeScreen(theme_names(self.available_themes)), self._use_theme)

    def _use_theme(self, name: str | None) -> None:
        """Apply the chosen theme and store it for later starts."""
        if name is None:
            return
        self.theme = name
        self.remember("theme", name)

    def remember(self, setting: str, value: Any) -> None:
        """Store what the user has chosen in the dashboard, or show why it will not be used."""
        reason = self.settings.remember(setting, value)
        if reason is not None and reason not in self._shown_reasons:
            self._shown_reasons.add(reason)
            self.notify(reason, severity="warning", markup=False)

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
        from ltui.app.save_chart import drawn_chart, save_chart

        source = str(getattr(message.chart.screen, "chart_source", ""))
        try:
            if self.is_web:
                # The person is at another machine, perhaps; nothing is written on this one.
                name, content = drawn_chart(message.chart, message.form, source)
                self.deliver_binary(BytesIO(content), save_filename=f"{name}.{message.form}")
                return
            path = save_chart(message.chart, message.form, Path.cwd(), source)
        except ProblemError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"Saved {path}", markup=False)

    def _fatal_error(self) -> None:
        """Close after an unexpected error, with one sentence that names the log."""
        error = sys.exc_info()[1]
        if error is not None and self._crash is None:
            self._crash = log_error(self.home, error, "The dashboard has crashed")
        self._close_messages_no_wait()

    def show_worker_error(self, error: Exception) -> None:
        happened = "An action in the background has failed"
        sentence = log_error(self.home, error, happened).split("\n", 1)[0]
        self.notify(sentence, severity="error", timeout=20, markup=False)

    def _print_error_renderables(self) -> None:
        """Print why the dashboard has ended, once the terminal is restored."""
        super()._print_error_renderables()
        if self._crash is not None:
            print(self._crash, file=sys.stderr)

    def action_leave(self) -> None:
        """Quit at once from any screen. The screen of a run prints that its run keeps running."""
        farewells = (getattr(screen, "farewell", None) for screen in reversed(self.screen_stack))
        farewell = next(filter(None, farewells), None)
        self.exit(message=farewell() if farewell is not None else None)

    def action_interrupt(self) -> None:
        """Ask whether Ctrl-C is to stop the run on the screen or to close ltui.

        Quit where no live run is shown, or where this dashboard cannot stop it.
        """
        # Imported here: the home screen needs no commands of a run.
        from ltui.app.screens.run_commands import InterruptScreen, RunCommandScreen

        if isinstance(self.screen, InterruptScreen):
            return
        runs = (s for s in reversed(self.screen_stack) if isinstance(s, RunCommandScreen))
        run = next(runs, None)
        if run is None or not run.ask_interrupt():
            self.action_leave()

    def action_command_palette(self) -> None:
        """Open the palette, except on a question, which only its own keys answer."""
        # Imported here: the first screen has no palette and asks nothing.
        from ltui.app.screens.dialog import ConfirmScreen
        from ltui.app.screens.palette import Palette

        if not isinstance(self.screen, ConfirmScreen) and not isinstance(self.screen, Palette):
            hint = "Search keys, metrics, runs and presets…"
            self.push_screen(Palette(placeholder=hint))


LOG_NAME = "dashboard.log"
MOST_BYTES = 1 << 20
"""Size from which the log begins anew."""


def log_error(home: Path, error: BaseException, happened: str) -> str:
    """Write a traceback to the log, and return the sentence for the user: what has happened.

    If the log cannot be written, the traceback follows the sentence.
    """
    path = home / LOG_NAME
    text = "".join(traceback.format_exception(error))
    reason = clean_line(f"{type(error).__name__}: {error}", 200)
    sentence = f"{happened} ({reason}). Training continues. The traceback"
    try:
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.unlink()
        with open_private_log(path) as log:
            entry = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n"
            log.write(entry.encode(errors="backslashreplace"))
    except OSError as unwritable:
        return f"{sentence} cannot be written to {path} ({unwritable.strerror}):\n{text}"
    return f"{sentence} is in {path}"
