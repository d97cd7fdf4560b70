"""One served dashboard: the process that draws for one page of a browser.

``python -m ltui.app.dashboard_process [--control] [--run RUN_DIR]``, started by
``dashboard_server.py`` with Textual's web driver: standard input and output carry its packets.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ltui.app.open_dashboard import pause_garbage_collection
from ltui.training.store.run_directory import RunDir, ltui_home

_OF_SERVER = ("TEXTUAL_DRIVER", "TEXTUAL_FPS", "TEXTUAL_COLOR_SYSTEM", "COLUMNS", "ROWS")
"""Variables that are for this process, and not for the runs that it starts."""


def main() -> int:
    """Show the dashboard until the page is closed. Return the exit code."""
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
