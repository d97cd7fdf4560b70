"""The list of presets on the home screen, with its filter.

The presets of the home screen, read from files: the selected one first, the others later. Its
methods are called in a worker's thread, because reading takes longer than one frame.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.panels.panel import FilterPanel, Panel
from ltui.widgets.sanitise import clean_name

if TYPE_CHECKING:
    from ltui.training.config.presets import Preset


TITLE = "presets"
OWN_SCRIPT = "ltui exec -- python train.py"
"""How a run without a preset is started."""
CHANGED = "▌"
"""Sign of a line of the configuration that differs from the preset."""


class PresetEntry(Struct, frozen=True, kw_only=True):
    """One line of the list: a shipped preset or a configuration file of the user."""

    name: str
    tags: tuple[str, ...] = ()
    own: bool = False
    """True for a file in the current folder, False for a shipped preset."""
    problem: str | None = None
    """The reason why the file can't be read; None if it can."""

    def labels(self) -> tuple[str, ...]:
        """Return the labels to show after the name, the most important first."""
        if self.problem is not None:
            return ("damaged",)
        return ("yours", *self.tags) if self.own else self.tags


class PresetList(OptionList):
    """A list in which a click highlights a line, and a double click or Enter selects it."""

    class WidthChanged(Message):
        """The width of the list changed, so another number of labels may fit."""

    _clicked_selected = False
    """True if the first click of a double click was on the highlighted line."""
    _width = 0

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._width:
            self._width = event.size.width
            self.post_message(self.WidthChanged())

    def on_click(self, event: events.Click) -> None:
        # The base class would select the line at the first click.
        event.prevent_default()
        index = event.style.meta.get("option")
        if index is None or self.get_option_at_index(index).disabled:
            return
        if event.chain == 1:
            self._clicked_selected = index == self.highlighted
            self.highlighted = index
        elif event.chain == 2 and self._clicked_selected and index == self.highlighted:
            self.action_select()


class PresetsPanel(FilterPanel):
    """The panel of presets that match the filter."""

    LIST: ClassVar[str] = "#preset-list"

    @dataclass
    class Highlighted(Message):
        """The cursor moved to another preset; ``name`` is None if no preset matches the filter."""

        name: str | None

    class Entered(Message):
        """The highlighted preset was selected with Enter or a double click."""

    def __init__(self, names: Sequence[str], *, id: str) -> None:  # noqa: A002 - Textual's name
        """``names`` are shown until ``show`` is called with the entries that were read."""
        super().__init__(1, TITLE, id=id)
        self._entries = tuple(PresetEntry(name=name) for name in names)
        self._last: str | None = None

    def compose(self) -> ComposeResult:
        yield Input(
            placeholder="filter by name or tag", id="filter", compact=True, classes="filter"
        )
        options = [Option(Text(entry.name), id=entry.name) for entry in self._entries]
        yield PresetList(*options, id="preset-list", markup=False)
        yield Static(f"your own script:\n{OWN_SCRIPT}", id="side-script", markup=False)

    @property
    def options(self) -> PresetList:
        return self.query_one(PresetList)

    def show(self, entries: Sequence[PresetEntry]) -> None:
        """Replace the list; the cursor stays on its preset."""
        self._entries = tuple(entries)
        self.fill_list()

    @on(PresetList.WidthChanged)
    def _fit_labels(self, event: PresetList.WidthChanged) -> None:
        event.stop()
        self.fill_list()

    def fill_list(self) -> None:
        options = self.options
        pattern = self.filter_text.lower()
        shown = [e for e in self._entries if pattern in f"{e.name} {' '.join(e.labels())}".lower()]
        options.clear_options()
        options.add_options([Option(self._line(entry), id=entry.name) for entry in shown])
        names = [entry.name for entry in shown]
        if names:
            # Start on a shipped preset, so that Enter launches the quickstart for new users.
            first = next((n for n, entry in enumerate(shown) if not entry.own), 0)
            last = self._last
            options.highlighted = names.index(last) if last in names else first
        else:
            options.add_option(
                Option(Text("no match; Esc clears the filter", "dim"), disabled=True)
            )
            self.post_message(self.Highlighted(None))
        self.set_titles(TITLE, f"{len(names)} of {len(self._entries)}" if pattern else "")

    def _line(self, entry: PresetEntry) -> Text:
        text = Text(clean_name(entry.name))
        available = self.options.scrollable_content_region.width - len(text) - 2
        labels = ""
        for label in map(clean_name, entry.labels()):
            longer = f"{labels}, {label}" if labels else label
            if len(longer) > available:
                break
            labels = longer
        if labels:
            style = "bold" if entry.problem is not None else "dim"
            text.append(labels.rjust(available + 2), style)
        return text

    @property
    def highlighted_name(self) -> str | None:
        options = self.options
        if options.highlighted is None:
            return None
        return options.get_option_at_index(options.highlighted).id

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all presets, including damaged files and presets that the filter hides."""
        return tuple(entry.name for entry in self._entries)

    def select(self, name: str) -> None:
        """Move cursor and focus to a preset. The filter is cleared if it hides the preset."""
        self._last = name
        if name not in (option.id for option in self.options.options):
            self.clear_filter()
            self.fill_list()
        self.options.highlighted = self.options.get_option_index(name)
        self.options.focus()

    # -- events ------------------------------------------------------------------------------------

    @on(OptionList.OptionHighlighted)
    def _moved(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if event.option_id is not None:
            self._last = event.option_id
            self.post_message(self.Highlighted(event.option_id))

    @on(OptionList.OptionSelected)
    def _entered(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Entered())


class ConfigurationPanel(Panel):
    """The configuration of the run that the form describes, in YAML."""

    def __init__(self) -> None:
        super().__init__(None, "configuration", id="yaml")

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="yaml-text", markup=False)

    def show(self, text: str, changed: Container[int] = ()) -> None:
        """Show ``text``, with a sign at the lines whose numbers are in ``changed``."""
        lines = Text()
        for number, line in enumerate(text.splitlines(keepends=True)):
            is_changed = number in changed
            lines.append(f"{CHANGED if is_changed else ' '} {line}", "bold" if is_changed else "")
        self.query_one("#yaml-text", Static).update(lines)
        self.set_titles(self.title, f"{CHANGED} changed" if changed else "")


class PresetCatalog:
    """The presets that were read, and the problems of files that can't be read."""

    def __init__(self) -> None:
        self.presets: dict[str, Preset] = {}
        """Presets by name; empty until all files were read."""
        self.problems: dict[str, str] = {}
        """The reason by name for each file that can't be read."""

    @property
    def is_read(self) -> bool:
        """True if all files were read."""
        return bool(self.presets or self.problems)

    def read_first(self, name: str | None, folder: Path) -> Preset | None:
        """Return one preset; None if it can't be read. ``read_all`` finds the reason."""
        # Imported here: the first frame shows names only.
        from ltui.training.config.presets import load_preset
        from ltui.training.problem import ProblemError

        try:
            return None if name is None else load_preset(name, folder)
        except ProblemError:
            return None

    def read_all(self, folder: Path, first: Preset | None) -> list[PresetEntry]:
        """Read every preset but ``first``, which was read before; return the lines of the list."""
        # Imported here: the first frame shows names only.
        from ltui.training.config.preset_discovery import preset_names
        from ltui.training.config.presets import damaged_files, load_preset
        from ltui.training.problem import ProblemError

        presets = {} if first is None else {first.name: first}
        problems = {name: str(problem) for name, problem in damaged_files(folder).items()}
        names = (*problems, *preset_names(folder))
        for name in names:
            try:
                if name not in presets:
                    presets[name] = load_preset(name, folder)
            except ProblemError as error:
                problems[name] = str(error.problems[0])
        self.presets, self.problems = presets, problems
        return _entries(names, presets, problems)


def _entries(
    names: Sequence[str], presets: dict[str, Preset], problems: dict[str, str]
) -> list[PresetEntry]:
    """Return the lines of the list: the user's files first, then the shipped presets."""
    entries = [
        PresetEntry(
            name=name,
            tags=presets[name].tags if name in presets else (),
            own=name.startswith("./"),
            problem=problems.get(name),
        )
        for name in names
    ]
    return sorted(entries, key=lambda entry: (not entry.own, entry.own and entry.name))
