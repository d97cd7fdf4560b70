"""``ltui run``, ``exec`` and ``resume``: start a run, and show it unless it is detached.

People wait for the first training step, so each function imports only what it needs itself.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TypeVar

from msgspec import convert

from ltui.app.actions.resume_runs import ResumeOptions, prepare_resume
from ltui.app.actions.start_runs import (
    LaunchOptions,
    OtherNodeError,
    PreparedRun,
    StartedRun,
    prepare,
)
from ltui.app.command_output import EXIT_DONE, print_envelope
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.training.config.run_spec import Nodes
from ltui.training.store.run_directory import RunDir, ltui_home

DATA = dict.fromkeys(("run", "execute", "resume"), StartedRun)
"""What ``--json`` prints; see ``for_programs``."""
_Options = TypeVar("_Options", LaunchOptions, ResumeOptions)


def run(options: Namespace) -> int:
    """Run ``ltui run PRESET|FILE``."""
    return _start(options, LaunchOptions, prepare)


def execute(options: Namespace) -> int:
    """Run ``ltui exec -- COMMAND...``."""
    return _start(options, LaunchOptions, prepare)


def resume(options: Namespace) -> int:
    """Run ``ltui resume RUN``."""
    return _start(options, ResumeOptions, prepare_resume)


def _start(
    options: Namespace, kind: type[_Options], prepare: Callable[[_Options], PreparedRun]
) -> int:
    """Start a run, or join it if a launcher has started it on its first machine, and follow it."""
    try:
        prepared = prepare(convert(options, kind, from_attributes=True))
    except OtherNodeError as error:
        return _join_and_follow(error.nodes, options)
    if options.detach or options.json or options.queue:
        return _report(_launch(prepared), as_json=options.json)
    nodes = prepared.nodes
    by_launcher = nodes is not None and nodes.start in ("srun", "launcher")
    with ReceivedSignals(stop_on_terminate=by_launcher).catching() as caught:
        started = _launch(prepared)
        if started.job is not None:
            return _report(started, as_json=False)
        for line in _said(started):
            print(line, flush=True)
        # Imported here, so that the run's processes start at the same time.
        from ltui.app.foreground.follow_run import follow_run

        run_dir = RunDir(ltui_home() / "runs" / started.id)
        return follow_run(run_dir, caught, plain=options.plain)


def _launch(prepared: PreparedRun) -> StartedRun:
    """Start a run, and print its warnings afterwards: those of a refused run are of no use."""
    started = prepared.launch()
    for warning in started.warnings:
        # Imported here: most runs have none.
        from ltui.widgets.sanitise import clean_line

        sys.stderr.write(f"warning: {clean_line(warning, 1000)}\n")
    return started


def _report(started: StartedRun, *, as_json: bool) -> int:
    """Print that a run goes on by itself."""
    if as_json:
        print_envelope(started, [f"ltui wait {started.id}"])
        return EXIT_DONE
    if started.queued:
        # Imported here: most runs start at once.
        from ltui.app.commands.queue import report_queued

        return report_queued(RunDir(ltui_home() / "runs" / started.id))
    if started.job is not None:
        print(f"{started.id} is queued in SLURM as job {started.job}.")
        return EXIT_DONE
    # Imported here: only a detached run needs it.
    from ltui.app.presentation.notifications import started_line

    print("\n".join([*_said(started), started_line(started.id)]))
    return EXIT_DONE


def _said(started: StartedRun) -> list[str]:
    """Return the lines about what a person has to know or to do."""
    # Imported here: few starts have such lines.
    from ltui.widgets.sanitise import clean_line

    return [*(clean_line(line, 2000) for line in started.frozen), *started.to_join]


def _join_and_follow(nodes: Nodes, options: Namespace) -> int:
    """Join the run that a launcher starts on all nodes, and wait until this node has ended."""
    from ltui.app.nodes.join_run import follow_agent, join_by_launcher, joined_line

    joined = join_by_launcher(nodes, options.key_file, options.python, ltui_home())
    if not options.json:
        print(joined_line(joined), flush=True)
    if options.detach or options.json:
        return EXIT_DONE
    with ReceivedSignals(stop_on_terminate=True).catching() as signals:
        left = follow_agent(joined, signals) >= 128
    # Node 0 reports how the run ended. Another code here would make a launcher kill node 0.
    return 128 + (signals.leave or 0) if left else EXIT_DONE
