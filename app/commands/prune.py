"""``ltui prune``: delete the ended runs that match a filter."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from contextlib import closing

from ltui.app.exit_codes import EXIT_DONE, EXIT_FAILED
from ltui.app.presentation.run_report import columns
from ltui.app.runs.filter_runs import fields_of, run_filter, unknown_names
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_list import RunList
from ltui.training.lifecycle.recover_runs import current_snapshot
from ltui.training.lifecycle.resume_run import delete
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import ltui_home
from ltui.widgets.formats import size
from ltui.widgets.sanitise import clean_name


def prune(options: Namespace) -> int:
    """Run ``ltui prune --filter EXPR [--dry-run]``."""
    if not options.filter.strip():
        raise ProblemError.of(
            where="--filter",
            what="an empty filter matches every run.",
            remedy="Give a condition, such as 'state=failed ended<30d ago'.",
        )
    matches = run_filter(options.filter, time.time())
    used = fields_of(options.filter)
    with closing(RunList(ltui_home(to_write=not options.dry_run), current_snapshot)) as runs:
        every_run = runs.complete(runs.poll(), used)
        # A misspelt metric behind `not` would match every run.
        if every_run and (sentences := unknown_names(used, every_run)):
            raise ProblemError(*(Problem(where="--filter", what=text) for text in sentences))
        matching = [entry for entry in every_run if _may_go(entry) and matches(entry)]
        chosen = runs.complete(matching, ("size",))
    if not chosen:
        print("No run to delete: live, starred and unreadable runs are always kept.")
        return EXIT_DONE
    deleted = chosen if options.dry_run else [entry for entry in chosen if _delete(entry)]
    rows = [(clean_name(e.id), e.state, size(e.size_bytes)) for e in deleted]
    print("\n".join(columns(rows, frozenset({2}))))
    verb = "Would delete" if options.dry_run else "Deleted"
    runs_text = "1 run" if len(deleted) == 1 else f"{len(deleted)} runs"
    print(f"{verb} {runs_text}, {size(sum(entry.size_bytes or 0.0 for entry in deleted))}.")
    return EXIT_DONE if len(deleted) == len(chosen) else EXIT_FAILED


def _may_go(entry: RunEntry) -> bool:
    return not entry.live and not entry.labels.star and entry.summary is not None


def _delete(entry: RunEntry) -> bool:
    """Delete a run, unless it got a star or was resumed meanwhile."""
    try:
        if read_labels(entry.run_dir).star:
            return False
        delete(entry.run_dir)
    except ProblemError as error:
        sys.stderr.write(f"{error}\n")
        return False
    return True
