"""The home screen without its widgets: which panels are visible, its keys, and its footer.

The visible panels depend on the size of the terminal and on choice. The keys in the footer depend
on the widget that has the focus.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace
from textual.widget import Widget
from textual.widgets import Input, Select

from ltui.app.keys.footer import FIELD_HELP_HINT, KeyHint

PRESETS, FORM, RUNS, YAML = "presets", "form", "runs", "yaml"
PANELS = (PRESETS, FORM, RUNS, YAML)
"""All panels in the order of their numbers, from 1."""
LEAST_WIDTH, LEAST_HEIGHT = 60, 12
SIDE_WIDTH = 120
"""Columns from which the presets stand beside the list of runs."""
YAML_WIDTH, YAML_HEIGHT = 140, 20
"""Size from which the configuration stands beside the form."""


class HomeLayout(Struct, frozen=True, kw_only=True):
    """The runs, or what a new run is started with. Without a run, always the latter."""

    width: int = 160
    height: int = 50
    has_runs: bool = False
    new_run: bool = False
    """Presets and form fill the screen although there are runs."""
    zoomed: str = ""
    """The panel that fills the screen of a new run; empty if none does."""
    side_presets: bool = True
    """The presets are shown beside the runs if there is room."""

    @property
    def tiny(self) -> bool:
        """True if the terminal has no room for any panel."""
        return self.width < LEAST_WIDTH or self.height < LEAST_HEIGHT

    @property
    def shows_runs(self) -> bool:
        """True if the list of runs is shown, False if presets and form are."""
        return self.has_runs and not self.new_run

    def visible(self) -> frozenset[str]:
        """Return the names of the visible panels."""
        if self.tiny:
            return frozenset()
        if self.shows_runs:
            beside = self.side_presets and self.width >= SIDE_WIDTH
            return frozenset({RUNS, PRESETS} if beside else {RUNS})
        if self.zoomed:
            return frozenset({self.zoomed})
        has_room = self.width >= YAML_WIDTH and self.height >= YAML_HEIGHT
        return frozenset({PRESETS, FORM, YAML} if has_room else {PRESETS, FORM})

    def showing(self, panel: str) -> HomeLayout:
        """Return the layout with a panel visible: the presets beside the runs if they are there."""
        if panel == RUNS:
            return replace(self, new_run=False, zoomed="")
        return self if panel in self.visible() else replace(self, new_run=True, zoomed="")

    def maximised(self, panel: str) -> HomeLayout:
        """Return the layout of a new run with one panel, or with all if one was maximised."""
        return replace(self, new_run=True, zoomed="" if self.zoomed else panel)


KEYS = """
N      | new_run       | new run    | Choose a preset for a new run
enter  | launch        | launch     | Open the run; of a preset, the form; there: start it
W      | sweeps        | sweeps     | Open the sweep that was started last
e      | edit          | edit YAML  | Edit the configuration of the selected preset
c      | check         | check      | Check by loading the model and data classes
/      | filter        | filter     | Filter the runs, or the presets if their list has the focus
0      | reset_form    | reset form | Set every field of the form back; of the runs, the panels
Q      | queue         | run queue  | The runs that wait to be started: order, reasons, changes
ctrl+o | queue_form    | queue      | In the form: put the run into the run queue
z      | zoom          | maximise   | Maximise the panel in focus, or restore it; runs: remembered
1      | go('presets') | presets    | Go to the presets
2      | go('form')    | form       | Go to the form
3      | go('runs')    | runs       | Go to the runs
escape | back          | back       | Clear the filter; go from form to presets to runs
q      | leave         | quit       | Quit (training continues)
"""
"""Table of bindings for ``make_bindings.bindings``."""

_LAUNCH_HINT = KeyHint("⏎", "launch", "screen.launch", keep=True)
_QUEUE_HINT = KeyHint("ctrl+o", "queue", "screen.queue_form")
_NEXT_HINT = KeyHint("tab", "next", "app.focus_next")
_BACK_HINT = KeyHint("esc", "presets", "screen.back", keep=True)
_LAST_HINTS = (
    KeyHint("?", "help", "app.help", keep=True),
    KeyHint("q", "quit", "screen.leave", keep=True),
)
_PRESET_HINTS = (
    KeyHint("⏎", "choose", "screen.launch", keep=True),
    KeyHint("e", "edit YAML", "screen.edit"),
    KeyHint("/", "filter", "screen.filter"),
    _NEXT_HINT,
    *_LAST_HINTS,
)
_RUNS_HINT = KeyHint("esc", "runs", "screen.go('runs')", keep=True)
_RUN_LIST_HINTS = (
    KeyHint("⏎", "open", "screen.open_run", keep=True),
    KeyHint("N", "new run", "screen.new_run", keep=True),
    KeyHint("s", "stop", "screen.stop"),
    KeyHint("r", "resume", "screen.resume"),
    KeyHint("Q", "queue", "screen.queue", keep=True),
    KeyHint("/", "filter", "screen.filter"),
    KeyHint("o", "sort", "screen.sort"),
    KeyHint("m", "columns", "screen.columns"),
    KeyHint("space", "mark", "screen.mark"),
    KeyHint("C", "compare", "screen.compare"),
)
_SWEEPS_HINT = KeyHint("W", "sweeps", "screen.sweeps")
# A text field takes letters as input, so no letter is offered as a key there.
_FIELD_HINTS = (
    _LAUNCH_HINT,
    _QUEUE_HINT,
    _NEXT_HINT,
    _BACK_HINT,
    FIELD_HELP_HINT,
    KeyHint("ctrl+q", "quit", "app.leave"),
)
_CHOICE_HINTS = (
    KeyHint("⏎", "choose", "app.focus_next", keep=True),
    _NEXT_HINT,
    _BACK_HINT,
    *_LAST_HINTS,
)
_FILTER_HINTS = (
    KeyHint("⏎", "keep the filter", "screen.keep_filter", keep=True),
    KeyHint("esc", "clear the filter", "screen.back", keep=True),
    FIELD_HELP_HINT,
    KeyHint("ctrl+q", "quit", "app.leave"),
)


def home_hints(
    focused: Widget | None, *, in_runs: bool, has_runs: bool, has_sweeps: bool
) -> tuple[KeyHint, ...]:
    """Return the hints for the footer, depending on the widget that has the focus."""
    if isinstance(focused, Input):
        return _FILTER_HINTS if focused.has_class("filter") else _FIELD_HINTS
    if isinstance(focused, Select):
        return _CHOICE_HINTS
    if focused is not None and focused.id == "launch-line":
        return (_LAUNCH_HINT, _QUEUE_HINT, _NEXT_HINT, _BACK_HINT, *_LAST_HINTS)
    if in_runs:
        return (*_RUN_LIST_HINTS, *[_SWEEPS_HINT] * has_sweeps, *_LAST_HINTS)
    return (*_PRESET_HINTS[:1], _RUNS_HINT, *_PRESET_HINTS[1:]) if has_runs else _PRESET_HINTS
