"""``ltui runs``, ``show`` and ``delete``: list runs, show one, delete one."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from ltui.app.commands.output_file import print_json
from ltui.app.exit_codes import EXIT_DONE
from ltui.app.presentation.run_report import runs_lines, show_lines
from ltui.app.state_words import state_words
from ltui.training.lifecycle.recover_runs import current_snapshot
from ltui.training.lifecycle.resume_run import delete as delete_run
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunSnapshot, head_json, to_json
from ltui.training.store.run_directory import find_run, list_runs, ltui_home


def list_all(options: Namespace) -> int:
    """Run ``ltui runs``."""
    snapshots: list[RunSnapshot] = []
    for run_dir in list_runs(ltui_home(to_write=False)):
        try:
            snapshots.append(current_snapshot(run_dir))
        except ProblemError as error:
            # One unreadable run must not hide the others.
            sys.stderr.write(f"{error}\n")
    if options.json:
        print_json([_with_word(head_json(snapshot), snapshot) for snapshot in snapshots])
    elif snapshots:
        print("\n".join(runs_lines(snapshots, time.time())))
    else:
        print("No runs yet. Start one with: ltui run quickstart")
    return EXIT_DONE


def show(options: Namespace) -> int:
    """Run ``ltui show RUN``."""
    snapshot = current_snapshot(find_run(ltui_home(to_write=False), options.run))
    if options.json:
        print_json(_with_word(to_json(snapshot), snapshot))
    else:
        print("\n".join(show_lines(snapshot, time.time())))
    return EXIT_DONE


def delete(options: Namespace) -> int:
    """Run ``ltui delete RUN``."""
    run_dir = find_run(ltui_home(), options.run)
    delete_run(run_dir)
    print(f"{run_dir.id} was deleted with its history, logs and checkpoints.")
    return EXIT_DONE


def _with_word(document: dict[str, Any], snapshot: RunSnapshot) -> dict[str, Any]:
    """Add the state's word, which is also ``"STALLED"`` for a live run with a stalled rank."""
    return {**document, "state_word": state_words(snapshot)}
