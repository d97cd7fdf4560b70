"""``ltui rename``, ``tag``, ``group``, ``note``, ``star``: labels by which runs are found again."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ltui.app.command_output import EXIT_DONE
from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import (
    RunLabels,
    checked_group,
    checked_name,
    checked_note,
    checked_tags,
    with_tags,
)
from ltui.training.store.find_run import find_runs, name_note
from ltui.training.store.labels_file import change_labels, read_labels
from ltui.training.store.run_directory import list_runs, ltui_home
from ltui.widgets.sanitise import clean_line


def tag(options: Namespace) -> int:
    """Run ``ltui tag RUN... [--add TAG] [--remove TAG]``."""
    added = checked_tags(options.add, "--add")
    removed = checked_tags(options.remove, "--remove")
    if both := sorted(set(added) & set(removed)):
        raise ProblemError.of(where="--remove", what=f"{both[0]!r} is to be added, too.")

    def change(labels: RunLabels) -> RunLabels:
        return replace(labels, tags=with_tags(labels, added, removed, "--add"))

    return _print(
        options.runs,
        lambda labels: ", ".join(labels.tags) or "no tags",
        change if added or removed else None,
    )


def group(options: Namespace) -> int:
    """Run ``ltui group RUN... [--name GROUP | --remove]``."""
    name = checked_group(options.name or "", "--name")
    return _print(
        options.runs,
        lambda labels: labels.group or "no group",
        None
        if options.name is None and not options.remove
        else lambda labels: replace(labels, group=name),
    )


def note(options: Namespace) -> int:
    """Run ``ltui note RUN [TEXT]``."""
    text = checked_note(options.text or "", "TEXT")
    return _print(
        [options.run],
        lambda labels: labels.note or "no note",
        None if options.text is None else lambda labels: replace(labels, note=text),
    )


def rename(options: Namespace) -> int:
    """Run ``ltui rename RUN NAME``."""
    name = checked_name(options.name, "NAME")
    renamed = find_runs(ltui_home(to_write=True), [options.run])
    status = _print(
        [options.run],
        lambda labels: labels.name or "named by its id",
        lambda labels: replace(labels, name=name),
    )
    runs = list_runs(ltui_home(to_write=False))
    for run_dir in renamed:
        if note := name_note(runs, run_dir, name):
            sys.stderr.write(f"Note: {clean_line(note)}\n")
    return status


def star(options: Namespace) -> int:
    """Run ``ltui star RUN... [--remove]``."""
    return _print(
        options.runs,
        lambda labels: "starred" if labels.star else "not starred",
        lambda labels: replace(labels, star=not options.remove),
    )


def _print(
    runs: Sequence[str],
    text_of: Callable[[RunLabels], str],
    change: Callable[[RunLabels], RunLabels] | None,
) -> int:
    """Print a label of every run, with ``change`` after it was changed.

    Nothing is changed unless all of the runs were found.
    """
    for run_dir in find_runs(ltui_home(to_write=change is not None), runs):
        labels = read_labels(run_dir) if change is None else change_labels(run_dir, change)
        print(f"{run_dir.id}: {text_of(labels)}")
    return EXIT_DONE
