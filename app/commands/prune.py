"""``ltui prune``: delete the ended runs that match a filter."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import closing

from ltui.app.exit_codes import EXIT_DONE, EXIT_FAILED
from ltui.app.presentation.run_report import columns
from ltui.app.runs.matching_runs import matching_runs
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_list import RunList
from ltui.training.lifecycle.resume_run import delete
from ltui.training.problem import ProblemError
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
    with closing(RunList(ltui_home(to_write=not options.dry_run))) as runs:
        matching = [entry for entry in matching_runs(runs, options.filter) if _may_go(entry)]
        chosen = runs.complete(matching, ("size",))
    if not chosen:
        print("No run to delete: live, starred and damaged runs are always kept.")
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
