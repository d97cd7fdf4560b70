"""Make an ended run of metrics that another tool has written."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import create_run_directory, home_not_writable
from ltui.training.state.run_labels import RunLabels, checked_name
from ltui.training.state.run_snapshot import Event, MetricValue, RunSnapshot, RunState
from ltui.training.store.foreign_metrics import ForeignPoint, ForeignRun
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from ltui.training.store.labels_file import labels_text
from ltui.training.store.run_directory import RunDir, given_name, new_run_id

TAG = "imported"
"""Tag of every imported run."""
_BATCH = 20_000
"""Number of values that are written in one transaction."""
_KEEP_ALL = 1 << 60

_Sample = tuple[int, int, str, int | None, int | None, float, float]


def import_run(run: ForeignRun, home: Path, name: str | None) -> RunDir:
    """Create a run with the metrics of ``run``, completely or not at all.

    Raise ``ProblemError`` if the name cannot be used or the home cannot be written.
    """
    given = checked_name(given_name(name), "--name")
    run_id, name = new_run_id(home, name or _name_of(run.folder))
    spec = RunSpec(
        id=run_id,
        name=name,
        created_at=run.began_at,
        cwd=str(run.folder),
        python="",
        preset=f"import of {run.folder.name}",
        nproc=0,
        imported_from=str(run.folder),
    )
    run_dir = RunDir(home / "runs" / run_id)
    files = {RunDir.LABELS_NAME: labels_text(RunLabels(name=given, tags=(TAG,)))}
    try:
        create_run_directory(
            run_dir,
            spec,
            files,
            fill=lambda folder: _write_history(folder.db_path, run, _snapshot(run, spec, run_dir)),
        )
    except OSError as error:
        raise home_not_writable(home, error) from error
    return run_dir


def _name_of(folder: Path) -> str:
    """Return a name for the run from that of its folder, ``version_3`` with the one above it."""
    words = folder.resolve().parts[-2:] if folder.name.startswith("version_") else (folder.name,)
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-._")[-40:].lstrip("-._")
    return text if text and text != "last" else "imported"


def _write_history(path: Path, run: ForeignRun, snapshot: RunSnapshot) -> None:
    store = StoreWriter(path, keep_rows=_KEEP_ALL)
    try:
        store.begin_attempt(
            1,
            # SQLite stores NaN as NULL.
            started_at=run.began_at if run.has_times else math.nan,
            boot_id=None,
            resumed_path=None,
            resumed_step=None,
        )
        numbers = itertools.count()
        samples = _samples(run, numbers)
        while part := list(itertools.islice(samples, _BATCH)):
            store.commit(1, Batch(samples=part))
        events = [
            Event(
                rank=0,
                seq=next(numbers),
                t=run.began_at,
                kind="hyperparameters",
                text="hyperparameters",
                data={"values": run.hyperparameters},
            )
        ]
        rest = Batch(events=events if run.hyperparameters else [])
        rest.cursors = {0: Cursor(next(numbers))}
        store.commit(1, rest, snapshot)
        store.set_state(1, run.ended_at, snapshot.state, snapshot.detail, None)
        if run.has_times:
            store.end_attempt(1, run.ended_at)
    finally:
        store.close()


def _samples(run: ForeignRun, numbers: Iterator[int]) -> Iterator[_Sample]:
    for name, points in run.points.items():
        for point in points:
            time = math.nan if point.time is None else point.time
            yield 0, next(numbers), name, point.step, point.epoch, time, point.value


def _snapshot(run: ForeignRun, spec: RunSpec, run_dir: RunDir) -> RunSnapshot:
    all_points = [point for points in run.points.values() for point in points]
    return RunSnapshot(
        id=spec.id,
        name=spec.name,
        state=RunState.FINISHED,
        detail=f"imported from {run.source}",
        preset=spec.preset,
        created_at=run.began_at,
        started_at=run.began_at if run.has_times else None,
        ended_at=run.ended_at,
        epoch=max((point.epoch for point in all_points if point.epoch is not None), default=None),
        global_step=max(point.step for point in all_points),
        elapsed_s=run.ended_at - run.began_at if run.has_times else None,
        metrics={name: _metric(points) for name, points in run.points.items()},
        run_dir=str(run_dir.path),
        taken_at=run.ended_at,
    )


def _metric(points: Sequence[ForeignPoint]) -> MetricValue:
    numbers = [point.value for point in points if not math.isnan(point.value)]
    return MetricValue(
        last=points[-1].value,
        step=points[-1].step,
        best_min=min(numbers, default=None),
        best_max=max(numbers, default=None),
    )
