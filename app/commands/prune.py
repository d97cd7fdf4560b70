"""``ltui delete``, ``prune`` and ``restore``: runs by name, those that match a filter, the bin."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import closing

from ltui.app.command_output import EXIT_DONE, EXIT_FAILED
from ltui.app.presentation.run_report import columns
from ltui.app.runs.filter_runs import matching_runs
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_list import RunList
from ltui.training.lifecycle.delete_runs import CLEAN_S, empty_bin, remove
from ltui.training.lifecycle.delete_runs import delete as delete_run
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.find_run import DeletedRun, deleted_runs, find_deleted, find_runs
from ltui.training.store.find_run import restore as restore_run
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir, disk_use, ltui_home
from ltui.widgets.formats import size
from ltui.widgets.sanitise import clean_name


def delete(options: Namespace) -> int:
    """Run ``ltui delete RUN... [--now] [--dry-run]``.

    Nothing is deleted unless all of the runs were found. A live one keeps none from being deleted.
    """
    home = ltui_home(to_write=not options.dry_run)
    problems: list[Problem] = []
    for run_dir in dict.fromkeys(find_runs(home, options.runs)):
        try:
            _delete_named(run_dir, options)
        except ProblemError as error:
            problems += error.problems
    if not options.dry_run:
        empty_bin(home, limit_s=CLEAN_S)
    if problems:
        raise ProblemError(*problems)
    return EXIT_DONE


def _delete_named(run_dir: RunDir, options: Namespace) -> None:
    name, use = clean_name(run_dir.id), size(disk_use(run_dir.path))
    if options.dry_run:
        where = "would be removed for ever" if options.now else "would be moved to the bin"
        print(f"{name}, {use}, {where}.")
        return
    deleted = delete_run(run_dir, now=options.now)
    if options.now:
        print(f"{name} was removed with its history, logs and checkpoints, {use}.")
    else:
        print(f"{name} is in the bin. Until {deleted.until}: ltui restore {name}")


def restore(options: Namespace) -> int:
    """Run ``ltui restore [RUN...]``. Nothing is restored unless all of the runs were found."""
    home = ltui_home(to_write=bool(options.runs))
    if not options.runs:
        print("\n".join(_bin_lines(deleted_runs(home))) or "The bin is empty.")
        return EXIT_DONE
    for deleted in dict.fromkeys([find_deleted(home, text) for text in options.runs]):
        print(f"{clean_name(restore_run(deleted).id)} is in the list of runs again.")
    empty_bin(home, limit_s=CLEAN_S)
    return EXIT_DONE


def _bin_lines(runs: list[DeletedRun]) -> list[str]:
    rows = [(clean_name(run.id), f"until {run.until}", size(disk_use(run.path))) for run in runs]
    return list(columns(rows, frozenset({2})))


def _empty_bin(options: Namespace) -> int:
    """Remove what is in the bin for ever."""
    home = ltui_home(to_write=not options.dry_run)
    runs = deleted_runs(home)
    lines, total = _bin_lines(runs), size(sum(disk_use(run.path) for run in runs))
    removed = 0
    for run in [] if options.dry_run else runs:
        try:
            remove(run)
            removed += 1
        except ProblemError as error:
            sys.stderr.write(f"{error}\n")
    if not options.dry_run:
        empty_bin(home)
    print("\n".join(lines) if lines else "The bin is empty.")
    if options.dry_run or len(runs) == removed:
        runs_text = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        print(f"{'Would remove' if options.dry_run else 'Removed'} {runs_text}, {total}.")
        return EXIT_DONE
    print(f"Removed {removed} of {len(runs)} runs.")
    return EXIT_FAILED


def prune(options: Namespace) -> int:
    """Run ``ltui prune --filter EXPR [--now] [--dry-run]``, or ``ltui prune --bin``."""
    if (options.filter is None) is not options.bin:
        raise ProblemError.of(
            where="prune",
            what="either --filter EXPR or --bin is needed, not both.",
            remedy="ltui prune --help",
        )
    if options.bin:
        return _empty_bin(options)
    if not options.filter.strip():
        raise ProblemError.of(
            where="--filter",
            what="an empty filter matches every run.",
            remedy="Give a condition, such as 'state=failed ended<30d ago'.",
        )
    home = ltui_home(to_write=not options.dry_run)
    with closing(RunList(home)) as runs:
        matching = [entry for entry in matching_runs(runs, options.filter) if _may_go(entry)]
        chosen = runs.complete(matching, ("size",))
    if not chosen:
        print("No run to delete: live, starred and damaged runs are always kept.")
        return EXIT_DONE
    deleted = list(chosen)
    if not options.dry_run:
        deleted = [entry for entry in chosen if _delete(entry, now=options.now)]
    rows = [(clean_name(e.id), e.state, size(e.size_bytes)) for e in deleted]
    print("\n".join(columns(rows, frozenset({2}))))
    verb = ("Would remove" if options.now else "Would delete") if options.dry_run else "Deleted"
    runs_text = "1 run" if len(deleted) == 1 else f"{len(deleted)} runs"
    print(f"{verb} {runs_text}, {size(sum(entry.size_bytes or 0.0 for entry in deleted))}.")
    if not options.dry_run:
        if deleted and not options.now:
            print("They are in the bin for a week: `ltui restore` lists them.")
        empty_bin(home, limit_s=CLEAN_S)
    return EXIT_DONE if len(deleted) == len(chosen) else EXIT_FAILED


def _may_go(entry: RunEntry) -> bool:
    return not entry.live and not entry.labels.star and entry.summary is not None


def _delete(entry: RunEntry, *, now: bool) -> bool:
    """Delete a run, unless it got a star or was resumed meanwhile."""
    try:
        if read_labels(entry.run_dir).star:
            return False
        delete_run(entry.run_dir, now=now)
    except ProblemError as error:
        sys.stderr.write(f"{error}\n")
        return False
    return True
