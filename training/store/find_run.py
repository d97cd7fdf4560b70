"""The runs that a user names: by an id, its beginning, a name, or ``last``; and the deleted ones.

A deleted run can be restored from the bin for a week. It is deleted and restored by one rename,
from ``runs/RUN`` to ``bin/SECOND-RUN`` and back, so it is always whole in one of the two places.
The new name has the unix time of the deletion. A run directory that is a symbolic link stays one:
only the link moves. What is outside of the run directory, such as a history on a local disk, stays
where it is until the run leaves the bin.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from ltui.training.problem import Problem, ProblemError
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir, list_runs, paths_in

MOST_LISTED = 12
"""Number of runs that an ambiguous name lists; the others are counted."""


def find_run(home: Path, text: str) -> RunDir:
    """Return the run that ``text`` names: an id, a name, a unique prefix of an id, or ``last``.
    A name that was given later counts if no id begins with it.

    Raise ``ProblemError`` with the most similar id if there is none, or with the ids if several
    runs match.
    """
    return named_run(list_runs(home), text)


def find_runs(home: Path, texts: Iterable[str]) -> list[RunDir]:
    """Return the run that each text names. Raise ``ProblemError`` with every text that is wrong."""
    runs = list_runs(home)
    chosen: list[RunDir] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            chosen.append(named_run(runs, text))
        except ProblemError as error:
            problems += error.problems
    if problems:
        raise ProblemError(*problems)
    return chosen


def named_run(runs: Sequence[RunDir], text: str) -> RunDir:
    """Return the run of ``list_runs`` that ``text`` names, as ``find_run`` does."""
    if not isinstance(text, str):  # A program may pass anything.
        raise ProblemError.of(where=f"RUN {text!r}", what="a run is named by a text.")
    if text == "last":
        if runs:
            return runs[0]
        remedy = "Start one: ltui run quickstart"
        raise ProblemError(Problem("RUN", "there is no run yet.", remedy, code="no-such-run"))
    for matches in (
        [run for run in runs if run.id == text],
        [run for run in runs if run.id[:-5] == text],
        [run for run in runs if text and run.id.startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise _ambiguous(text, matches)
    named = [run for run in runs if text and read_labels(run).name.lower() == text.lower()]
    if len(named) == 1:
        return named[0]
    if named:
        raise _ambiguous(text, named)
    remedy = _nearest_run(runs, text)
    raise ProblemError(Problem(text, "there is no such run.", remedy, code="no-such-run"))


def name_note(runs: Sequence[RunDir], run: RunDir, name: str) -> str:
    """Return what to say if ``name``, which a person gave ``run``, does not name it alone."""
    try:
        named = named_run(runs, name) if name else run
    except ProblemError:
        named = None
    if named == run:
        return ""
    if named is not None and name not in (named.id, named.id[:-5]):
        return f"The id of {named.id} begins with this name: use the id {run.id}."
    return f"Another run has this name too: use the id {run.id}."


def _ambiguous(text: str, matches: Sequence[RunDir]) -> ProblemError:
    ids = ", ".join(run.id for run in matches[:MOST_LISTED])
    more = f" and {len(matches) - MOST_LISTED} more" if len(matches) > MOST_LISTED else ""
    what = f"several runs match: {ids}{more}."
    return ProblemError(Problem(text, what, "Give the full id.", code="several-runs"))


def _nearest_run(runs: Sequence[RunDir], text: str) -> str:
    near = difflib.get_close_matches(text, [run.id for run in runs], n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(text, [run.id[:-5] for run in runs], n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else "ltui runs lists them."


_SECOND = re.compile("[0-9]{1,11}")
KEEP_S = 7 * 86400.0
"""Seconds for which a deleted run stays in the bin."""


class DeletedRun(Struct, frozen=True):
    """A run in the bin."""

    path: Path
    home: Path
    id: str
    deleted_at: float
    """Unix time."""

    @property
    def restored(self) -> RunDir:
        """Where the run was, and where a restore moves it to."""
        return RunDir(self.home / "runs" / self.id)

    @property
    def until(self) -> str:
        """Until when the run can be restored, as ``2026-11-30 18:20``."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.deleted_at + KEEP_S))


def bin_folders(home: Path) -> tuple[Path, Path]:
    """Return the bin, and the one for runs on another file system than ``home``."""
    return home / "bin", home / "runs" / ".bin"


def move_to_bin(run_dir: RunDir) -> DeletedRun:
    """Move a run that is not live. Raises ``ProblemError`` if that is not possible."""
    now = int(time.time())
    while is_taken(path := bin_folders(run_dir.home)[0] / f"{now}-{run_dir.id}"):
        now += 1
    reason = "the bin cannot be written"
    for folder in bin_folders(run_dir.home):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            os.rename(run_dir.path, folder / path.name)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EXDEV:
                continue
            break
        return DeletedRun(folder / path.name, run_dir.home, run_dir.id, float(now))
    raise ProblemError.of(
        where=str(run_dir.path), what=f"it cannot be moved to the bin ({reason})."
    )


def is_taken(path: Path) -> bool:
    """Return whether there is anything at ``path``, be it a broken link."""
    return os.path.lexists(path)


def deleted_runs(home: Path) -> list[DeletedRun]:
    """Return the runs in the bin, the one that was deleted last first."""
    found = []
    for folder in bin_folders(home):
        for path in paths_in(folder):
            second, _, run_id = path.name.partition("-")
            if _SECOND.fullmatch(second) and run_id and (path.is_symlink() or path.is_dir()):
                found.append(DeletedRun(path, home, run_id, float(second)))
    return sorted(found, key=lambda run: -run.deleted_at)


def find_deleted(home: Path, text: str) -> DeletedRun:
    """Return the run in the bin that ``text`` names, the one that was deleted last of several with
    one id. Raises ``ProblemError``."""
    by_id = {run.id: run for run in reversed(deleted_runs(home))}
    newest_first = sorted(by_id.values(), key=lambda run: -run.deleted_at)
    try:
        return by_id[named_run([run.restored for run in newest_first], text).id]
    except ProblemError as error:
        if "several" in error.problems[0].what:
            raise
        raise ProblemError.of(
            where=text, what="it is not in the bin.", remedy="`ltui restore` lists what is."
        ) from error


def restore(deleted: DeletedRun) -> RunDir:
    """Move a run back to where it was. Raises ``ProblemError`` if that is not possible."""
    run_dir = deleted.restored
    if is_taken(run_dir.path):
        raise ProblemError.of(
            where=deleted.id,
            what="there is a run with this id again.",
            remedy=f"Delete or move {run_dir.path} first.",
        )
    try:
        os.rename(deleted.path, run_dir.path)
    except OSError as error:
        raise ProblemError.of(
            where=str(deleted.path), what=f"it cannot be restored ({error.strerror or error})."
        ) from error
    return run_dir


def is_in_bin(run_dir: RunDir) -> RunDir | None:
    """Return where a deleted run is now; None if it is not in the bin."""
    runs = (run for run in deleted_runs(run_dir.home) if run.id == run_dir.id)
    return next((RunDir(run.path) for run in runs), None)
