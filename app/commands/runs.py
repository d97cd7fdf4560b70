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
from ltui.training.store.run_directory import RunDir, find_run, list_runs, ltui_home


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
    run_dir = find_run(ltui_home(to_write=False), options.run)
    if options.code:
        return _show_code(run_dir, as_json=options.json)
    snapshot = current_snapshot(run_dir)
    if options.json:
        print_json(_with_word(to_json(snapshot), snapshot))
    else:
        print("\n".join(show_lines(snapshot, time.time())))
    return EXIT_DONE


def _show_code(run_dir: RunDir, *, as_json: bool) -> int:
    """Print what code the last attempt of a run was started with."""
    # Imported here: other commands do not need it.
    from ltui.app.presentation.code_lines import code_lines
    from ltui.training.store.code_record import read_diff, read_records

    records = read_records(run_dir)
    if not records:
        raise ProblemError.of(
            where=run_dir.id,
            what="no code was recorded for this run.",
            remedy="It is recorded some seconds after the start of a run.",
        )
    diff = read_diff(run_dir, records[-1].attempt)
    if as_json:
        print_json(
            [{**to_json(record), "diff": read_diff(run_dir, record.attempt)} for record in records]
        )
    else:
        print("\n".join(code_lines(records, diff)))
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
