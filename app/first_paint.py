"""What stands on the terminal before Textual is imported, which alone takes half a second.

Nothing of it is made up: the names of the presets, where home shows them a moment later. Standard
library only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ltui.presets

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J\x1b[H"
_LEAVE = "\x1b[?1049l\x1b[?25h"


def shipped_preset_names() -> list[str]:
    """Read from the folder alone, ``quickstart`` first."""
    folder = Path(str(ltui.presets.__file__)).parent
    try:
        names = [
            name.removesuffix(".yaml") for name in os.listdir(folder) if name.endswith(".yaml")
        ]
    except OSError:
        return []
    return sorted(names, key=lambda name: (name != "quickstart", name))


def first_lines(run: str | None) -> list[str]:
    """Home's title and presets, or the name of the run that is being opened."""
    if run is not None:
        return [f" {run}", "", "   opening the run …"]
    return [" ltui", "", *(f"   {name}" for name in shipped_preset_names())]


def paint(run: str | None) -> None:
    """Draw ``first_lines``, where standard output is a terminal."""
    if not sys.stdout.isatty():
        return
    try:
        width, height = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return
    lines = [line[:width] for line in first_lines(run)]
    sys.stdout.write(_ENTER + "\r\n".join(lines[:height]))
    sys.stdout.flush()


def wipe() -> None:
    """Give the terminal back, where nothing else came to do it."""
    if sys.stdout.isatty():
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
