"""Open the dashboard. This module imports nothing heavy itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ltui.app.garbage_collection import pause_during_start
from ltui.app.terminal_loss import exit_with_terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ltui.app.textual_app import LtuiApp
    from ltui.training.store.run_directory import RunDir


def run_dashboard(
    home: Path, *, run: RunDir | None = None, readonly: bool = False, python: str | None = None
) -> int:
    """Run the dashboard at its home screen, or at ``run``, and return the exit code.

    ``python`` is the interpreter of the runs launched here; None means that of the active
    environment.
    """

    def make() -> LtuiApp:
        # Local: the garbage collector is paused while Textual is imported.
        from ltui.app.textual_app import LtuiApp

        return LtuiApp(home, run=run, readonly=readonly, python=python)

    return open_app(make)


def open_app(make: Callable[[], LtuiApp]) -> int:
    """Run the application that ``make`` imports and builds, and return its exit code."""
    pause_during_start()
    app = make()
    exit_with_terminal()
    app.run()
    return app.return_code or 0
