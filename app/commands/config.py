"""``ltui config``: print the settings with the origin of each, edit or check the file."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from textual.theme import BUILTIN_THEMES

from ltui.app.command_output import EXIT_BAD_INPUT, EXIT_DONE, print_envelope
from ltui.app.config_file import locate, theme_faults
from ltui.app.keys.own_keys import action_faults, default_keys, usable_keys
from ltui.app.settings import Settings, config_path, read_user_config
from ltui.app.textual_app import LtuiApp, first_theme
from ltui.app.user_config import SETTINGS, UserConfig
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.run_directory import ltui_home, make_private_folders
from ltui.widgets.palette import THEMES
from ltui.widgets.sanitise import clean_line

EDITORS = ("nano", "vim", "vi")
"""Editors to try if neither VISUAL nor EDITOR is set."""
ORIGIN_COLUMN = 44
"""Column in which the origin of a value begins, if the value is short enough."""
THEME_NAMES = frozenset({*BUILTIN_THEMES, *(theme.name for theme in THEMES)})

DATA = {"config": {"path": str, "settings": [{"key": str, "value": Any, "origin": str}]}}


def config(options: Namespace) -> int:
    """Run ``ltui config [--edit | --check [FILE] | --json]``."""
    if options.edit:
        return _edit(config_path())
    if options.check is not None:
        return _check(Path(options.check) if options.check else config_path())
    user_config = read_user_config()
    values, problems = list(_resolved(user_config)), _find_problems(user_config)
    if options.json:
        rows = [{"key": key, "value": value, "origin": origin} for key, value, origin in values]
        document = {"path": str(user_config.path), "settings": rows}
        print_envelope(document, error=ProblemError(*problems) if problems else None)
    else:
        missing = "" if user_config.path.exists() else " (missing: `ltui config --edit` creates it)"
        print(f"# {clean_line(str(user_config.path))}{missing}")
        print("\n".join(_yaml_lines(values)))
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return EXIT_BAD_INPUT if problems else EXIT_DONE


def _resolved(user_config: UserConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield the dotted path, the value and the origin of every setting."""
    settings = Settings(ltui_home(to_write=False), user_config)
    for path in SETTINGS:
        value, origin = settings.value(path), settings.origin(path)
        if path == "theme":
            value = first_theme(settings, THEME_NAMES, os.environ)
        yield path, value, origin
    own = usable_keys(user_config.keys)[0]
    for name, keys in default_keys(LtuiApp).items():
        written = user_config.origin(f"keys.{name}") if name in own else None
        chosen = own.get(name, keys)
        yield f"keys.{name}", chosen[0] if len(chosen) == 1 else list(chosen), written or "default"
    for key, value in user_config.launch.items():
        yield f"launch.{key}", value, user_config.origin(f"launch.{key}") or ""


def _yaml_lines(values: list[tuple[str, Any, str]]) -> Iterator[str]:
    """Yield the settings as a configuration file, with the origin as a comment."""
    last_group = ""
    for path, value, origin in values:
        group, _, name = path.partition(".")
        if name and group != last_group:
            yield f"{group}:"
            last_group = group
        text = f"  {name}: {_yaml(value)}" if name else f"{path}: {_yaml(value)}"
        decides = ": the dashboard decides" if value is None else ""
        yield f"{text:<{ORIGIN_COLUMN}}  # {origin}{decides}"


def _yaml(value: Any) -> str:
    """Return a value as YAML on one line; control characters are escaped."""
    return yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()[1:-1]


def _find_problems(user_config: UserConfig) -> list[Problem]:
    faults = theme_faults(user_config, THEME_NAMES)
    if user_config.keys:
        usable, key_faults = usable_keys(user_config.keys)
        faults += key_faults + action_faults(user_config.keys, usable, default_keys(LtuiApp))
    return [*user_config.problems, *locate(user_config, faults)]


def _check(path: Path) -> int:
    if not path.exists():
        raise ProblemError.of(
            where=str(path),
            what="no such file.",
            remedy="`ltui config --edit` creates the configuration file.",
        )
    user_config = read_user_config(path)
    if problems := _find_problems(user_config):
        raise ProblemError(*problems)
    count = len(user_config.values) + len(user_config.keys) + len(user_config.launch)
    print(f"{clean_line(str(path))}: no errors, {count} setting{'s' * (count != 1)}.")
    return EXIT_DONE


def _edit(path: Path) -> int:
    words = _editor_words()
    try:
        if not path.exists():
            make_private_folders(path.parent)
            path.write_text(_template(), encoding="utf-8")
        done = subprocess.run([*words, str(path)], check=False)
    except OSError as error:
        what = f"the file cannot be edited: {error.strerror or error}."
        raise ProblemError.of(where=str(error.filename or path), what=what) from error
    if done.returncode != 0:
        what = f"the editor ended with exit code {done.returncode}."
        raise ProblemError.of(where=shlex.join(words), what=what)
    return _check(path)


def _editor_words() -> list[str]:
    """Return the user's editor with its arguments."""
    for variable in ("VISUAL", "EDITOR"):
        if text := os.environ.get(variable, "").strip():
            try:
                words = shlex.split(text)
            except ValueError as error:
                what = f"the command cannot be split into words ({error})."
                raise ProblemError.of(where=variable, what=what) from error
            if shutil.which(words[0]) is None:
                what = f"no executable program `{clean_line(words[0])}` was found."
                raise ProblemError.of(where=variable, what=what, remedy="Name another editor.")
            return words
    for name in EDITORS:
        if shutil.which(name) is not None:
            return [name]
    raise ProblemError.of(
        where="ltui config --edit",
        what="no editor was found.",
        remedy="Set EDITOR to the command of one.",
    )


def _template() -> str:
    """Return a file in which every setting is a comment."""
    lines = [
        "# The configuration of ltui. Remove the `# ` before a line to use it. What is set here",
        "# wins over what the dashboard remembers. `ltui config` prints all values and actions.",
    ]
    last_group = ""
    for path, setting in SETTINGS.items():
        group, _, name = path.partition(".")
        if name and group != last_group:
            lines += ["", f"# {group}:"]
            last_group = group
        elif not name:
            lines.append("")
        indent = "  " if name else ""
        value = setting.example if setting.default is None else setting.default
        text = f"# {indent}{name or path}: {_yaml(value)}"
        lines.append(f"{text:<28} # {setting.about}")
    return "\n".join([*lines, "", *_EXAMPLES, ""])


_EXAMPLES = """\
# keys:                      # actions and their keys, instead of the default ones
#   run.stop: ctrl+s
#   chart.next_mark: ['.', f8]

# launch:                    # for runs whose preset does not set it
#   restarts: 2
#   stall: {then: restart, on_verdict: [notify-send, ltui]}
#   checkpoint: {every_s: 600}""".splitlines()
