"""``ltui tag``, ``group``, ``note`` and ``star``: labels by which runs are found again."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

from ltui.app.exit_codes import EXIT_DONE
from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import (
    RunLabels,
    checked_group,
    checked_note,
    checked_tags,
    with_tags,
)
from ltui.training.store.labels_file import change_labels, labels_text, read_labels
from ltui.training.store.run_directory import RunDir, find_runs, ltui_home


def tag(options: Namespace) -> int:
    """Run ``ltui tag RUN... [--add TAG] [--remove TAG]``."""
    added = checked_tags(options.add, "--add")
    removed = checked_tags(options.remove, "--remove")
    if both := sorted(set(added) & set(removed)):
        raise ProblemError.of(where="--remove", what=f"{both[0]!r} is to be added, too.")
    if not added and not removed:
        return _print(options, lambda labels: ", ".join(labels.tags) or "no tags")

    def change(labels: RunLabels) -> RunLabels:
        return replace(labels, tags=with_tags(labels, added, removed, "--add"))

    return _change(options, change, lambda labels: ", ".join(labels.tags) or "no tags")


def group(options: Namespace) -> int:
    """Run ``ltui group RUN... [--name GROUP | --remove]``."""
    if options.name is None and not options.remove:
        return _print(options, lambda labels: labels.group or "no group")
    name = "" if options.remove else checked_group(options.name, "--name")
    return _change(
        options,
        lambda labels: replace(labels, group=name),
        lambda labels: labels.group or "no group",
    )


def note(options: Namespace) -> int:
    """Run ``ltui note RUN [TEXT]``."""
    if options.text is None:
        return _print(options, lambda labels: labels.note or "no note")
    text = checked_note(options.text, "TEXT")
    return _change(
        options, lambda labels: replace(labels, note=text), lambda labels: labels.note or "no note"
    )


def star(options: Namespace) -> int:
    """Run ``ltui star RUN... [--remove]``."""
    return _change(
        options,
        lambda labels: replace(labels, star=not options.remove),
        lambda labels: "starred" if labels.star else "not starred",
    )


def label_files(options: Namespace) -> dict[str, str]:
    """Return the file with the labels of a run that is launched, by its name; empty if none is
    given. Raises ``ProblemError``."""
    labels = RunLabels(
        tags=with_tags(RunLabels(), checked_tags(options.tag, "--tag"), (), "--tag"),
        group=checked_group(options.group or "", "--group"),
        note=checked_note(options.note or "", "--note"),
    )
    return {} if labels == RunLabels() else {RunDir.LABELS_NAME: labels_text(labels)}


def _runs(options: Namespace, *, to_write: bool) -> list[RunDir]:
    return find_runs(ltui_home(to_write=to_write), options.runs)


def _change(
    options: Namespace,
    change: Callable[[RunLabels], RunLabels],
    text_of: Callable[[RunLabels], str],
) -> int:
    """Change the labels of every run, after all of the runs were found."""
    for run_dir in _runs(options, to_write=True):
        print(f"{run_dir.id}: {text_of(change_labels(run_dir, change))}")
    return EXIT_DONE


def _print(options: Namespace, text_of: Callable[[RunLabels], str]) -> int:
    for run_dir in _runs(options, to_write=False):
        print(f"{run_dir.id}: {text_of(read_labels(run_dir))}")
    return EXIT_DONE
