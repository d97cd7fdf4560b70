"""The command palette and the list of themes.

The palette offers the actions of a screen's keys, its metrics, and every run and preset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from msgspec import Struct
from rich.text import Text
from textual import on
from textual.app import ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.command import CommandList, CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.containers import Vertical
from textual.markup import escape
from textual.screen import ModalScreen, Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.keys.footer import ListedKey, listed_keys, refusal_of
from ltui.app.keys.ordered_input import is_closing
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_list import RunList
from ltui.app.screens.choosers import ChangingList
from ltui.app.screens.dialog import ClosableScreen, Dialog
from ltui.training.config.preset_discovery import preset_names
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.store.run_directory import RunDir, list_runs
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name

MAX_RUNS = 50
"""Number of runs that the palette offers at once, newest first."""
READ_RUNS_S = 0.3
"""Seconds for reading runs that are not in the index. The others are found by their ids."""


class Places(Protocol):
    """What the palette needs of the app."""

    home: Path

    def open_run(self, run_dir: RunDir) -> None:
        """Open a run."""

    def compare_runs(self, run_dirs: Sequence[RunDir]) -> None:
        """Open the comparison of some runs."""

    def open_preset(self, name: str) -> None:
        """Show a preset in the form of the home screen."""


class Place(Struct, frozen=True):
    """An entry of the palette that is the same on every screen."""

    title: str
    about: str
    open: Callable[[], object]

    def has_letters(self, query: str) -> bool:
        """Return whether the letters of ``query`` are in the texts in this order.

        The fuzzy matcher takes much longer to find out.
        """
        letters = iter(f"{self.title} {self.about}".lower())
        return all(letter in letters for letter in query.lower() if letter != " ")


class PlacesProvider(Provider):
    """Finds runs, by name, state and labels, and presets."""

    async def startup(self) -> None:
        self._runs: list[Place] = []
        self._presets: list[Place] = []
        if not isinstance(self.screen, ModalScreen):
            shown = getattr(self.screen, "run_dir", None)
            app = cast(Places, self.app)
            self._runs, self._presets = await asyncio.to_thread(read_places, app, shown)

    async def discover(self) -> Hits:
        for place in (*self._runs[:MAX_RUNS], *self._presets):
            yield DiscoveryHit(place.title, place.open, help=place.about)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        hits = 0
        for place in (*self._presets, *self._runs):
            if not place.has_letters(query):
                continue
            score = matcher.match(place.title) or matcher.match(f"{place.title} {place.about}") / 2
            if score > 0:
                yield Hit(score, matcher.highlight(place.title), place.open, help=place.about)
                hits += 1
            if hits >= MAX_RUNS:
                return


def read_places(app: Places, shown: RunDir | None) -> tuple[list[Place], list[Place]]:
    """Return all runs, newest first, and all presets. ``shown`` is the run on the screen."""
    with closing(RunList(app.home, resolve_snapshot)) as run_list:
        entries = {entry.id: entry for entry in run_list.poll(READ_RUNS_S)}
    runs = []
    for run_dir in list_runs(app.home):
        if run_dir == shown:
            continue
        entry = entries.get(run_dir.id)
        name = clean_name(run_dir.id)
        if entry is not None and entry.labels.name:
            # Such a name may have any characters, and the palette reads the text as markup.
            name = f"{escape(entry.name)} ({name})"
        about = "Go to this run" if entry is None else _about(entry)
        runs.append(Place(f"Open run {name}", about, partial(app.open_run, run_dir)))
        if shown is not None:
            compare = partial(app.compare_runs, [shown, run_dir])
            runs.append(Place(f"Compare with run {name}", about, compare))
    presets = [
        Place(
            f"Go to preset {clean_name(name)}",
            "Show this preset in the form of the home screen",
            partial(app.open_preset, name),
        )
        for name in preset_names(Path.cwd())
    ]
    return runs, presets


def _about(entry: RunEntry) -> str:
    """Return what identifies a run: its state, what it trains, and its labels."""
    labels = entry.labels
    program = "" if entry.summary is None else entry.summary.short_program
    parts = (entry.state, program, *labels.tags, labels.group, labels.note)
    # The palette reads the text as markup.
    return escape(" · ".join(part for part in parts if part))


def commands(screen: Screen[Any]) -> Iterator[SystemCommand]:
    """Yield one command for each action that is possible now, each with its own title."""
    titles: set[str] = set()
    actions: set[str] = set()
    chain = {screen, screen.app, *(screen.focused.ancestors_with_self if screen.focused else ())}
    for key in listed_keys(screen):
        action = key.binding.action
        # An action of a widget needs the focus on it, unless the screen carries it out.
        reachable = key.node in chain or action.startswith("screen.")
        name = action.removeprefix("screen.")
        listed = key.title.lower() in titles or name in actions or name == "command_palette"
        # Esc closes the palette, and again what is below it; a border moves by one cell.
        unfit = key.moves or key.keys == "esc" or name.startswith("border(")
        if not reachable or unfit or listed or refusal_of(screen, action) is not None:
            continue
        titles.add(key.title.lower())
        actions.add(name)
        about = escape(f"{key.about} · key {key.keys}")
        yield SystemCommand(key.title, about, _command_action(screen, key))
    palette_entries = getattr(screen, "palette_entries", None)
    if palette_entries is not None:
        for title, about, jump in palette_entries():
            yield SystemCommand(title, about, partial(_jump, screen, jump))


def _command_action(screen: Screen[Any], key: ListedKey) -> Callable[[], object]:
    app = screen.app
    return lambda: app.call_later(app.run_action, key.binding.action, default_namespace=key.node)


def _jump(screen: Screen[Any], jump: Callable[[], object]) -> None:
    """Go to an entry of a screen, unless the screen was closed since the palette was opened."""
    if not is_closing(screen):
        jump()


class ThemeScreen(Dialog[str]):
    """Return the chosen theme, or None after Esc, which restores the previous theme."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "themes",
        """
        escape,q,t | cancel | cancel | Close the list and keep the theme of before
        """,
    )

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        self._previous_theme = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield ChangingList(*(Option(name, id=name) for name in self._names), markup=False)
            yield Static(Text("↑↓ preview   ⏎ use   esc cancel"), id="answers")

    def on_mount(self) -> None:
        self._previous_theme = self.app.theme
        self.query_one(".dialog").border_title = "theme"
        options = self.query_one(OptionList)
        if self._previous_theme in self._names:
            options.highlighted = self._names.index(self._previous_theme)
        options.focus()

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if event.option_id is not None and event.option_id != self.app.theme:
            self.app.theme = event.option_id

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option_id)

    def action_cancel(self) -> None:
        self.app.theme = self._previous_theme
        self.dismiss(None)


class Commands(CommandList, ChangingList, can_focus=False):
    """The commands that were found, which the next search replaces."""


class Palette(CommandPalette, ClosableScreen[None]):
    """The palette, also for keys that arrive faster than it closes."""

    def compose(self) -> ComposeResult:
        for widget in super().compose():
            yield Commands() if type(widget) is CommandList else widget
