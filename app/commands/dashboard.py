"""``ltui``, ``ltui attach`` and ``ltui demo``: open the dashboard, or a demo of its screens."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ltui.training.problem import ProblemError
from ltui.training.state.asked_moment import parse_moment
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import ltui_home

if TYPE_CHECKING:
    from argparse import Namespace

    from ltui.app.textual_app import LtuiApp

MAX_SIMULATED_RANKS = 4096
"""Maximum number of ranks of ``ltui demo nodes``."""


def open_dashboard(options: Namespace) -> int:
    """Run ``ltui``, ``ltui --readonly`` and ``ltui attach RUN``."""
    at = getattr(options, "at", None)
    if at is not None:
        parse_moment(at, time.time(), f"--at {at}")
    return show_dashboard(options.run, readonly=options.readonly, at=at)


def show_dashboard(
    name: str | None = None, *, readonly: bool = False, at: str | None = None
) -> int:
    """Open the dashboard at its home screen, or at the run that ``name`` names.

    ``host:run`` names a run of another machine, which is reached by ssh. ``at``: the moment of the
    run that is shown first.

    Raises ``ProblemError`` without a terminal, and if there is no such run.
    """
    require_terminal("ltui", "Without one, use `ltui runs`, `ltui show RUN` or `ltui run PRESET`.")
    home = ltui_home(to_write=False)
    run = None
    if name is not None:
        if (home / "sweeps" / name).is_dir() and "/" not in name:
            if at is not None:
                raise ProblemError.of(where=f"--at {at}", what=f"{name} is a sweep, and no run.")
            # Local: as below, and most people attach to runs.
            from ltui.app.open_dashboard import run_dashboard
            from ltui.training.sweep.sweep_files import find_sweep

            return run_dashboard(home, sweep=find_sweep(home, name), readonly=readonly)
        run = None if ":" in name else find_run(home, name)
        if run is None or run.slurm_dir.exists():
            # Local: most runs are on this machine, and the person waits for the first screen.
            from ltui.app.slurm.remote_dashboard import attach_words, run_on_terminal, ssh_words

            if run is None:
                return run_on_terminal(ssh_words(name, readonly=readonly, at=at))
            if (words := attach_words(run, readonly=readonly)) is not None:
                if at is not None:
                    raise ProblemError.of(
                        where=f"--at {at}",
                        what="the dashboard of a job of SLURM opens at the present.",
                        remedy=f"Leave it out, then press b and type {at}.",
                    )
                return run_on_terminal(words)
    # Local: importing Textual takes half a second, which the errors above need not wait for.
    from ltui.app.open_dashboard import run_dashboard

    return run_dashboard(home, run=run, readonly=readonly, at=at)


def require_terminal(where: str, remedy: str) -> None:
    """Raise ``ProblemError`` if there is no terminal for the dashboard."""
    if not _has_terminal():
        raise ProblemError.of(where=where, what="the dashboard needs a terminal.", remedy=remedy)


def show_demo(options: Namespace) -> int:
    """Run ``ltui demo gpus`` and ``ltui demo nodes``."""
    if not _has_terminal():
        raise ProblemError.of(where=f"ltui demo {options.what}", what="the demo needs a terminal.")
    if options.what == "nodes" and options.recording is not None:
        raise ProblemError.of(where="ltui demo nodes", what="--recording is for `ltui demo gpus`.")
    if options.what == "gpus" and (options.nodes, options.gpus_per_node) != (None, None):
        message = "--nodes and --gpus-per-node are for `ltui demo nodes`."
        raise ProblemError.of(where="ltui demo gpus", what=message)
    # Local: as below.
    from ltui.app.open_dashboard import open_app

    make = _machines_demo if options.what == "nodes" else _gpu_demo
    return open_app(lambda: make(options))


def _gpu_demo(options: Namespace) -> LtuiApp:
    # Local: a refused demo does not need Textual.
    from ltui.app.gpu_demo import DemoApp, recorded_demo
    from ltui.training.gpu.reading import read_recording

    if options.recording is None:
        return DemoApp()
    try:
        return recorded_demo(read_recording(Path(options.recording)))
    except (OSError, ValueError) as error:
        raise ProblemError.of(
            where=f"--recording {options.recording}",
            what=f"{error}.",
            remedy="Give a recording.jsonl that the section readings of `make gpu` wrote.",
        ) from error


def _machines_demo(options: Namespace) -> LtuiApp:
    # Local: as above.
    from ltui.app.machines_demo import MachinesDemoApp
    from ltui.app.scripted_machines import Cluster

    chosen = {"nodes": options.nodes, "gpus_per_node": options.gpus_per_node}
    cluster = Cluster(**{name: value for name, value in chosen.items() if value is not None})
    if cluster.world_size > MAX_SIMULATED_RANKS:
        raise ProblemError.of(
            where="ltui demo nodes",
            what=f"{cluster.world_size} ranks are more than {MAX_SIMULATED_RANKS}.",
            remedy="Give fewer machines (--nodes) or GPUs on each (--gpus-per-node).",
        )
    return MachinesDemoApp(cluster)


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
