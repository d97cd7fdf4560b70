"""Open the dashboard on this terminal, or for a page of a browser. Nothing heavy is imported here.

``python -m ltui.app.open_dashboard [--control] [--run RUN_DIR]`` is the process that draws for one
page of ``ltui serve``. ``dashboard_server.py`` starts it with Textual's web driver: standard input
and output carry its packets.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ltui.training.store.run_directory import RunDir, ltui_home

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.screen import Screen

    from ltui.app.textual_app import LtuiApp
    from ltui.training.sweep.sweep_files import SweepDir


COLLECTION_PAUSE_S = 2.0
"""Seconds without garbage collection: longer than a start takes."""
TERMINAL_INTERVAL_S = 1.0
"""Seconds between two checks of the terminal."""


def run_dashboard(
    home: Path,
    *,
    run: RunDir | None = None,
    sweep: SweepDir | None = None,
    readonly: bool = False,
    at: str | None = None,
    before_exit: Callable[[], None] | None = None,
) -> int:
    """Run the dashboard at its home screen, or at ``run`` or ``sweep``; return the exit code.

    ``at``: the moment of the run that is shown first, as a person writes it. ``before_exit`` is
    called if the terminal closes without a signal.
    """

    def make() -> LtuiApp:
        # Local: the garbage collector is paused while Textual is imported.
        from ltui.app.textual_app import LtuiApp

        first: Callable[[], Screen[None]] | None = None
        if sweep is not None:
            from ltui.app.screens.sweep import SweepScreen

            first = partial(SweepScreen, sweep, readonly=readonly)
        return LtuiApp(home, run=run, first=first, readonly=readonly, at=at)

    return open_app(make, before_exit)


def open_app(make: Callable[[], LtuiApp], before_exit: Callable[[], None] | None = None) -> int:
    """Run the application that ``make`` imports and builds, and return its exit code."""
    pause_garbage_collection()
    app = make()
    terminal = partial(_exit_with_terminal, before_exit)
    threading.Thread(target=terminal, name="terminal", daemon=True).start()
    app.run()
    return app.return_code or 0


def pause_garbage_collection() -> None:
    """Switch the garbage collector off now, and on again after ``COLLECTION_PAUSE_S``.

    Importing Textual creates some hundred thousand objects that live until the process ends. The
    collector would traverse all of them several times before the first screen is drawn, which takes
    a quarter of the start.
    """
    gc.disable()
    timer = threading.Timer(COLLECTION_PAUSE_S, _resume_garbage_collection)
    timer.daemon = True
    timer.start()


def _resume_garbage_collection() -> None:
    # The existing objects live until the end anyway, so they are excluded.
    gc.freeze()
    gc.enable()


def _exit_with_terminal(before_exit: Callable[[], None] | None) -> None:
    """End this process when its terminal closes without a signal, for example under nohup.

    The process exits at once and prints nothing: drawing to a closed terminal would block or fail.
    Runs keep running; the dashboard owns none of their processes.
    """
    pause = threading.Event()
    while os.isatty(0):
        pause.wait(TERMINAL_INTERVAL_S)
    if before_exit is not None:
        before_exit()
    os._exit(128 + signal.SIGHUP)


_OF_SERVER = ("TEXTUAL_DRIVER", "TEXTUAL_FPS", "TEXTUAL_COLOR_SYSTEM", "COLUMNS", "ROWS")
"""Variables that are for this process, and not for the runs that it starts."""


def main() -> int:
    """Show the dashboard until the page is closed. Return the exit code."""
    # Imported here: only the process of a page has arguments.
    import argparse

    parser = argparse.ArgumentParser(prog="ltui-served-dashboard")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--run", type=Path)
    options = parser.parse_args()
    pause_garbage_collection()
    # Imported here: the garbage collector is paused, and Textual reads the variables now.
    from ltui.app.textual_app import LtuiApp

    size = int(os.environ["COLUMNS"]), int(os.environ["ROWS"])
    for name in _OF_SERVER:
        os.environ.pop(name, None)
    run = None if options.run is None else RunDir(options.run)
    app = LtuiApp(ltui_home(to_write=False), run=run, readonly=not options.control)
    app.run(size=size)
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
