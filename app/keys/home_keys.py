"""The keys of the home screen, and the keys that its footer shows for the focused widget."""

from __future__ import annotations

from textual.widget import Widget
from textual.widgets import Input, Select

from ltui.app.keys.footer import KeyHint

KEYS = """
enter  | launch        | launch     | Launch the selected preset; on a run: open it
e      | edit          | edit YAML  | Edit the configuration of the selected preset
c      | check         | check      | Check by loading the model and data classes
/      | filter        | filter     | Filter the presets, or the runs if their list has the focus
0      | reset_form    | reset form | Set every field of the form back to the preset's value
1      | go('presets') | presets    | Go to the presets
2      | go('form')    | form       | Go to the form
3      | go('runs')    | runs       | Go to the runs
escape | back          | back       | Clear the filter, or leave the field for the presets
q      | leave         | quit       | Quit (training continues)
"""
"""Table of bindings for ``make_bindings.bindings``."""

_LAUNCH_HINT = KeyHint("⏎", "launch", "screen.launch", keep=True)
_NEXT_HINT = KeyHint("tab", "next", "app.focus_next")
_BACK_HINT = KeyHint("esc", "presets", "screen.back", keep=True)
_LAST_HINTS = (
    KeyHint("?", "help", "app.help", keep=True),
    KeyHint("q", "quit", "screen.leave", keep=True),
    KeyHint("t", "theme", "app.choose_theme"),
)
_PRESET_HINTS = (
    _LAUNCH_HINT,
    KeyHint("e", "edit YAML", "screen.edit"),
    KeyHint("c", "check", "screen.check"),
    KeyHint("/", "filter", "screen.filter"),
    KeyHint("0", "reset form", "screen.reset_form"),
    _NEXT_HINT,
    *_LAST_HINTS,
)
_RUN_LIST_HINTS = (
    KeyHint("⏎", "open", "screen.open_run", keep=True),
    KeyHint("space", "mark", "screen.mark"),
    KeyHint("C", "compare", "screen.compare"),
    KeyHint("s", "stop", "screen.stop"),
    KeyHint("r", "resume", "screen.resume"),
    KeyHint("/", "filter", "screen.filter"),
    KeyHint("o", "sort", "screen.sort"),
    KeyHint("m", "columns", "screen.columns"),
    KeyHint("*", "star", "screen.star"),
    KeyHint("T", "tags", "screen.label('tags')"),
    KeyHint("R", "run again", "screen.rerun"),
    KeyHint("del", "delete", "screen.delete"),
    KeyHint("x", "export", "screen.export"),
    _NEXT_HINT,
    *_LAST_HINTS,
)
# A text field takes letters as input, so no letter is offered as a key there.
_FIELD_HINTS = (_LAUNCH_HINT, _NEXT_HINT, _BACK_HINT, KeyHint("ctrl+q", "quit", "app.leave"))
_CHOICE_HINTS = (
    KeyHint("⏎", "choose", "app.focus_next", keep=True),
    _NEXT_HINT,
    _BACK_HINT,
    *_LAST_HINTS,
)
_FILTER_HINTS = (
    KeyHint("⏎", "keep the filter", "screen.keep_filter", keep=True),
    KeyHint("esc", "clear the filter", "screen.back", keep=True),
    KeyHint("ctrl+q", "quit", "app.leave"),
)


def home_hints(focused: Widget | None, *, in_runs: bool) -> tuple[KeyHint, ...]:
    """Return the hints for the footer, depending on the widget that has the focus."""
    if isinstance(focused, Input):
        return _FILTER_HINTS if focused.has_class("filter") else _FIELD_HINTS
    if isinstance(focused, Select):
        return _CHOICE_HINTS
    return _RUN_LIST_HINTS if in_runs else _PRESET_HINTS
