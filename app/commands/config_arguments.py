"""The arguments of ``ltui config``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltui.app.commands.data_arguments import add_flag, add_json_option


def add_config(add: Callable[..., Any]) -> None:
    """Add ``ltui config``."""
    config = add("config", "config:config", "print, edit or check the configuration file", _EPILOG)
    action = config.add_mutually_exclusive_group()
    add_flag(action, "--edit", "open the file in $VISUAL or $EDITOR, and check it afterwards")
    action.add_argument(
        "--check",
        metavar="FILE",
        nargs="?",
        const="",
        help="name every mistake in the file (default: your own) with its line and the remedy",
    )
    add_json_option(action)


_EPILOG = """\
Prints every setting with its value and where it is from: a line of the file, the
choice that the dashboard remembers, or the default. The file wins over what is
remembered. It is config.yaml in $XDG_CONFIG_HOME/ltui (default: ~/.config/ltui).

examples:
  ltui config
  ltui config --edit
  ltui config --check conf/my-config.yaml
"""
