"""Opens the dashboard. Imports nothing heavy: a first picture stands before Textual is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ltui.app import first_paint
from ltui.app.terminal_gone import leave_with_the_terminal

if TYPE_CHECKING:
    from ltui.training.store.home import RunDir


def run_dashboard(
    home: Path, *, run: RunDir | None = None, readonly: bool = False, python: str | None = None
) -> int:
    """The dashboard at its home screen, or at ``run``; gives the exit code.

    ``python`` is the interpreter of runs launched here; None: that of the active environment.
    """
    first_paint.paint(None if run is None else run.id)
    try:
        # Textual alone takes longer to import than a person should look at an unanswered prompt.
        from ltui.app.dashboard import LtuiApp

        app = LtuiApp(home, run=run, readonly=readonly, python=python)
    except BaseException:
        first_paint.wipe()
        raise
    leave_with_the_terminal()
    app.run()
    return app.return_code or 0
