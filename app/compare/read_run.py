"""Read a run for a comparison from its directory; a live run is read as far as it is stored."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
from msgspec import Struct

from ltui.app.compare.alignment import Clock
from ltui.app.compare.compared_run import ComparedRun, summarise
from ltui.app.live.curve_arithmetic import default_choice
from ltui.app.live.frame import checkpoint_marks, stored_marks
from ltui.app.live.run_time import read_time
from ltui.app.presentation.metric_names import headline_first
from ltui.app.presentation.run_configuration import COMMIT_DIGITS, run_settings
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.metric_name_patterns import better_direction, is_evaluation
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.code_record import read_diff, read_records
from ltui.training.store.curve_reader import Curve
from ltui.training.store.history_reader import STEP_SERIES, RunStore
from ltui.training.store.labels_file import read_labels
from ltui.training.store.recorded_environment import recorded_values
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_name

MAX_POINTS = 1024
"""Maximum number of points of a curve: as many as a wide terminal shows."""
MAX_METRICS = 8
"""Maximum number of metrics that are compared unless a person names some."""

ReadSnapshot = Callable[[RunDir], RunSnapshot]


class RunsRead(Struct, frozen=True):
    """The runs that could be read, and what was wrong with the others."""

    runs: tuple[ComparedRun, ...]
    metrics: tuple[str, ...]
    """The metrics that are compared."""
    problems: tuple[Problem, ...]


def read_runs(
    run_dirs: Sequence[RunDir], globs: Sequence[str], snapshot_of: ReadSnapshot
) -> RunsRead:
    """Read runs with the metrics that match ``globs``, by default with those that matter most.

    A run that cannot be read does not keep the others from being compared. Raise ``ProblemError``
    if no run can be read, or if a glob matches no metric of any run.
    """
    names: dict[RunDir, list[str]] = {}
    problems: list[Problem] = []
    for run_dir in run_dirs:
        try:
            with RunStore(run_dir) as store:
                names[run_dir] = store.metric_names()
        except ProblemError as error:
            problems += error.problems
    together = sorted({name for some in names.values() for name in some})
    if names:
        metrics = matching_metrics(globs, together) if globs else default_metrics(together)
    runs: list[ComparedRun] = []
    for run_dir in names:
        try:
            runs.append(read_run(run_dir, metrics, snapshot_of))
        except ProblemError as error:
            problems += error.problems
    if not runs:
        raise ProblemError(*problems)
    return RunsRead(tuple(runs), metrics, tuple(problems))


def read_again(
    read: RunsRead, run_dirs: Sequence[RunDir], globs: Sequence[str], snapshot_of: ReadSnapshot
) -> RunsRead:
    """Return the runs with those read again that were live; with every run if a metric is new."""
    dirs = {run_dir.id: run_dir for run_dir in run_dirs}
    runs: list[ComparedRun] = []
    problems: list[Problem] = []
    for run in read.runs:
        try:
            runs.append(read_run(dirs[run.id], read.metrics, snapshot_of) if run.live else run)
        except ProblemError as error:
            # What was read before stays on the screen.
            runs.append(run)
            problems += error.problems
    names = {name for run in runs for name in run.metric_names}
    if names != {name for run in read.runs for name in run.metric_names}:
        return read_runs(run_dirs, globs, snapshot_of)
    return RunsRead(tuple(runs), read.metrics, tuple(problems))


def read_run(run_dir: RunDir, metrics: Collection[str], snapshot_of: ReadSnapshot) -> ComparedRun:
    """Return a run with the curves of those of ``metrics`` that it has.

    Raise ``ProblemError`` if its specification or its history cannot be read.
    """
    spec = run_dir.read_spec()
    snapshot = snapshot_of(run_dir)
    with RunStore(run_dir) as store:
        names = store.metric_names()
        curves = {name: _curve(store, name) for name in metrics}
        # A step has no learning rate, for example, if it is not known. A logged NaN is a value.
        curves = {
            name: curve
            for name, curve in curves.items()
            if len(curve) and (name in names or np.isfinite(curve.mean).any())
        }
        directions = {name: better_direction(name) for name in curves}
        if spec.checkpoint.best is not None:
            # The run itself says which values of this metric are better.
            directions[spec.checkpoint.best] = spec.checkpoint.mode
        summaries = {
            name: summarise(curve, partial(_part, store, name), directions[name])
            for name, curve in curves.items()
        }
        attempts = tuple(
            (attempt.started_at, attempt.ended_at)
            for attempt in store.attempts()
            if attempt.started_at is not None
        )
        labels = read_labels(run_dir)
        return ComparedRun(
            snapshot=snapshot,
            settings=run_settings(spec, store.hyperparameters()),
            code=_code(run_dir),
            environment=recorded_values(run_dir, snapshot.attempt),
            group=labels.group,
            metric_names=tuple(names),
            curves=curves,
            metrics={name: one for name, one in summaries.items() if one is not None},
            clock=Clock(attempts=attempts),
            time_s=_training_time(attempts, snapshot),
            samples_per_s=_mean_rate(store),
            peak_memory_bytes=store.peak_memory_bytes(),
            time=read_time(run_dir, snapshot).ledger,
            colour=labels.colour,
            marks=(*stored_marks(store), *checkpoint_marks(snapshot.checkpoints)),
        )


def default_metrics(names: Collection[str]) -> tuple[str, ...]:
    """Return the results of validation and what a run optimises, the main metric first.

    The first one ranks the runs: a minimum over single batches says little about a run.
    """
    first = default_choice(names)
    others = (name for name in names if is_evaluation(name) and name not in first)
    return tuple(headline_first([*first, *others][:MAX_METRICS]))


def matching_metrics(globs: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that match, in the order of the globs.

    Raise ``ProblemError`` for every glob that matches nothing.
    """
    names = [*names, *(name for name in STEP_SERIES if name not in names)]
    matches = {glob: [n for n in names if n == glob or fnmatchcase(n, glob)] for glob in globs}
    problems = [_unknown_metric(glob, names) for glob in globs if not matches[glob]]
    if problems:
        raise ProblemError(*problems)
    return tuple(dict.fromkeys(name for glob in globs for name in matches[glob]))


def _unknown_metric(glob: str, names: Sequence[str]) -> Problem:
    close = difflib.get_close_matches(glob, names, n=1)
    return Problem(
        where=f"--metric {clean_name(glob)}",
        what="none of these runs has such a metric.",
        remedy=f"Did you mean `{clean_name(close[0])}`?"
        if close
        else f"There are: {', '.join(map(clean_name, names))}.",
    )


def _curve(store: RunStore, name: str) -> Curve:
    return store.curve(name, max_points=MAX_POINTS, max_rows=MAX_POINTS)


def _part(store: RunStore, name: str, first: int | None, last: int | None) -> Curve:
    return store.curve(
        name, max_points=4 * MAX_POINTS, max_rows=MAX_POINTS, first_step=first, last_step=last
    )


def _code(run_dir: RunDir) -> dict[str, str]:
    """Return the code of the last attempt that has a record; empty if there is none."""
    records = read_records(run_dir)
    if not records:
        return {}
    last = records[-1]
    values = {f"package.{name}": version for name, version in last.packages.items()}
    if last.commit is None:
        return values
    changes = "none"
    if last.changed_count:
        # Two runs may have changed the same files in other ways.
        digest = zlib.crc32(read_diff(run_dir, last.attempt).encode("utf-8", "replace"))
        files = "1 file" if last.changed_count == 1 else f"{last.changed_count} files"
        changes = f"{files}, diff {digest:08x}"
    return {"code.commit": last.commit[:COMMIT_DIGITS], "code.changes": changes, **values}


def _training_time(
    attempts: Sequence[tuple[float, float | None]], snapshot: RunSnapshot
) -> float | None:
    """Return the seconds of all attempts; the last one may go on."""
    ended = [end - begin for begin, end in attempts[:-1] if end is not None]
    last = snapshot.elapsed_s
    if last is None and attempts and attempts[-1][1] is not None and snapshot.state not in LIVE:
        last = attempts[-1][1] - attempts[-1][0]
    return None if last is None else sum(ended) + last


def _mean_rate(store: RunStore) -> float | None:
    """Return the mean samples per second: those of rank 0, times the ranks of each attempt."""
    samples = seconds = 0.0
    for attempt, ranks in store.attempt_ranks().items():
        # The sums are the same at every resolution, so the coarsest one is read.
        done, spent = (
            store.curve(name, attempt=attempt, max_rows=1)
            for name in ("step/samples", "step/seconds")
        )
        if len(done) and len(spent):
            samples += float((done.mean * done.count)[done.count > 0].sum()) * len(ranks)
            seconds += float((spent.mean * spent.count)[spent.count > 0].sum())
    return samples / seconds if seconds > 0 and samples > 0 else None
