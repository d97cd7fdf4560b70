"""``ltui`` and ``ltui attach``: the dashboard."""

from __future__ import annotations

import sys
from argparse import Namespace

from ltui.training.problem import Problem, ProblemError
from ltui.training.store.home import find_run, ltui_home


def open_dashboard(options: Namespace) -> int:
    """The dashboard, at a run where one is named."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ProblemError(
            Problem(
                where="ltui",
                what="the dashboard needs a terminal.",
                remedy="Without one, use `ltui runs`, `ltui show RUN` or `ltui run PRESET`.",
            )
        )
    home = ltui_home(to_write=False)
    run = None if options.run is None else find_run(home, options.run)
    # Local: the errors above must not wait for Textual's half second.
    from ltui.app.app import run_dashboard

    return run_dashboard(home, run=run, readonly=options.readonly)
