"""``labels.json`` of a run: its tags, group, note and star."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ltui.training.problem import ProblemError
from ltui.training.shared.file_lock import file_lock
from ltui.training.state.run_labels import NO_LABELS, RunLabels, labels_from_document
from ltui.training.store.run_directory import RunDir, read_json, write_json

if TYPE_CHECKING:
    from ltui.training.state.run_snapshot import RunSnapshot


def read_labels(run_dir: RunDir) -> RunLabels:
    """Return the labels of a run; none if the file is missing or damaged."""
    return labels_from_document(read_json(run_dir.labels_path) or {})


def with_given_name(run_dir: RunDir, snapshot: RunSnapshot) -> RunSnapshot:
    """Return the snapshot with the name that a person gave the run after its launch or with
    characters that an id cannot have."""
    name = read_labels(run_dir).name
    return replace(snapshot, name=name) if name else snapshot


def labels_text(labels: RunLabels) -> str:
    """Return the content of the file."""
    return json.dumps(labels.to_document())


def files_at_launch(labels: RunLabels) -> dict[str, str]:
    """Return the content of the file by its name; empty if there are no labels."""
    return {} if labels == NO_LABELS else {RunDir.LABELS_NAME: labels_text(labels)}


def change_labels(run_dir: RunDir, change: Callable[[RunLabels], RunLabels]) -> RunLabels:
    """Replace the labels of a run by ``change(labels)`` and return them.

    Writers wait for each other, so that none overwrites what another one has just added. Raises
    ``ProblemError`` if the file cannot be written.
    """
    try:
        with file_lock(run_dir.labels_path.with_suffix(".lock")):
            before = read_labels(run_dir)
            labels = change(before)
            if labels != before:
                write_json(run_dir.labels_path, labels.to_document())
    except OSError as error:
        raise ProblemError.of(
            where=str(run_dir.labels_path),
            what=f"the labels cannot be written ({error.strerror or error}).",
            remedy="Check the owner of the run directory and the space on its disk.",
        ) from error
    return labels
