"""Opens the dashboard. Imports nothing heavy: a first picture stands before Textual is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ltui.training.store.home import RunDir

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J\x1b[H"
_LEAVE = "\x1b[?1049l\x1b[?25h"


def run_dashboard(
    home: Path, *, run: RunDir | None = None, readonly: bool = False, python: str | None = None
) -> int:
    """The dashboard at its home screen, or at ``run``; gives the exit code.

    ``python`` is the interpreter of runs launched here; None: that of the active environment.
    """
    _paint_first(None if run is None else run.id)
    try:
        # Textual alone takes longer to import than a person should look at an unanswered prompt.
        from ltui.app.dashboard import LtuiApp

        app = LtuiApp(home, run=run, readonly=readonly, python=python)
        app.run()
    finally:
        _leave()
    return app.return_code or 0


def _paint_first(run: str | None) -> None:
    """What stands on every first screen, at once; Textual then draws over it."""
    if not sys.stdout.isatty():
        return
    try:
        width, height = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return
    title = f" ltui · {run}" if run else " ltui"
    lines = [title[:width], "", "   opening the run …" if run else "   reading presets and runs …"]
    sys.stdout.write(_ENTER + "\r\n".join(lines[:height]))
    sys.stdout.flush()


def _leave() -> None:
    """Give the terminal back where the app could not (it failed before it started)."""
    if sys.stdout.isatty() and sys.exc_info()[0] is not None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
