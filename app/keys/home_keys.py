"""The keys of the home screen, and the keys that its footer shows for the focused widget."""

from __future__ import annotations

from textual.widget import Widget
from textual.widgets import Input, Select

from ltui.app.keys.footer import FIELD_HELP_HINT, KeyHint

KEYS = """
N      | new_run       | new run    | Choose a preset for a new run
enter  | launch        | launch     | Open the run; of a preset, the form; there: start it
e      | edit          | edit YAML  | Edit the configuration of the selected preset
c      | check         | check      | Check by loading the model and data classes
/      | filter        | filter     | Filter the runs, or the presets if their list has the focus
0      | reset_form    | reset form | Set every field of the form back; of the runs, the panels
z      | zoom          | maximise   | Maximise the panel in focus, or restore it; runs: remembered
1      | go('presets') | presets    | Go to the presets
2      | go('form')    | form       | Go to the form
3      | go('runs')    | runs       | Go to the runs
escape | back          | back       | Clear the filter; go from form to presets to runs
q      | leave         | quit       | Quit (training continues)
"""
"""Table of bindings for ``make_bindings.bindings``."""

_LAUNCH_HINT = KeyHint("⏎", "launch", "screen.launch", keep=True)
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
    KeyHint("/", "filter", "screen.filter"),
    KeyHint("o", "sort", "screen.sort"),
    KeyHint("m", "columns", "screen.columns"),
    KeyHint("space", "mark", "screen.mark"),
    KeyHint("C", "compare", "screen.compare"),
    *_LAST_HINTS,
)
# A text field takes letters as input, so no letter is offered as a key there.
_FIELD_HINTS = (
    _LAUNCH_HINT,
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


def home_hints(focused: Widget | None, *, in_runs: bool, has_runs: bool) -> tuple[KeyHint, ...]:
    """Return the hints for the footer, depending on the widget that has the focus."""
    if isinstance(focused, Input):
        return _FILTER_HINTS if focused.has_class("filter") else _FIELD_HINTS
    if isinstance(focused, Select):
        return _CHOICE_HINTS
    if focused is not None and focused.id == "launch-line":
        return (_LAUNCH_HINT, _NEXT_HINT, _BACK_HINT, *_LAST_HINTS)
    if in_runs:
        return _RUN_LIST_HINTS
    return (*_PRESET_HINTS[:1], _RUNS_HINT, *_PRESET_HINTS[1:]) if has_runs else _PRESET_HINTS
