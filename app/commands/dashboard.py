"""``ltui``, ``ltui attach`` and ``ltui demo``: open the dashboard, or its panels with simulated
GPUs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import find_run, ltui_home

if TYPE_CHECKING:
    from argparse import Namespace


def open_dashboard(options: Namespace) -> int:
    """Run ``ltui``, ``ltui --readonly`` and ``ltui attach RUN``."""
    return show_dashboard(options.run, readonly=options.readonly)


def show_dashboard(name: str | None = None, *, readonly: bool = False) -> int:
    """Open the dashboard at its home screen, or at the run that ``name`` names.

    Raises ``ProblemError`` without a terminal, and if there is no such run.
    """
    if not _has_terminal():
        raise ProblemError.of(
            where="ltui",
            what="the dashboard needs a terminal.",
            remedy="Without one, use `ltui runs`, `ltui show RUN` or `ltui run PRESET`.",
        )
    home = ltui_home(to_write=False)
    run = None if name is None else find_run(home, name)
    # Local: importing Textual takes half a second, which the errors above need not wait for.
    from ltui.app.open_dashboard import run_dashboard

    return run_dashboard(home, run=run, readonly=readonly)


def show_demo(options: Namespace) -> int:  # noqa: ARG001 - `gpus` is the only demo
    """Run ``ltui demo gpus``."""
    if not _has_terminal():
        raise ProblemError.of(where="ltui demo gpus", what="the demo needs a terminal.")
    # Local: a refused demo does not need Textual.
    from ltui.app.demo.gpu_demo import DemoApp

    app = DemoApp()
    app.run()
    return app.return_code or 0


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
