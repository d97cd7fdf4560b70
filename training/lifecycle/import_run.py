"""Make an ended run of metrics that another tool has written.

Metrics are read from files of Lightning's CSVLogger and from TensorBoard event files.
"""

from __future__ import annotations

import csv
import errno
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml
from msgspec import Struct, field

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import check_size
from ltui.training.lifecycle.launch_run import create_run_directory, home_not_writable
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import load_library
from ltui.training.shared.regular_files import is_regular_or_absent, read_regular
from ltui.training.state.run_labels import RunLabels, checked_name
from ltui.training.state.run_snapshot import Event, MetricValue, RunSnapshot, RunState
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


CSV_NAME = "metrics.csv"
"""Name of the file that Lightning's CSVLogger writes."""
_LEAST_TOO_LARGE = 2.0**63
"""Least number that is too large for a whole number of a history."""
_EPOCH = "epoch"
"""Name under which Lightning logs the epoch of a step, which is no metric."""
_MOST_CHARACTERS = 1 << 20
"""Characters of a line of a table from which it is not read."""


class ForeignPoint(Struct, frozen=True):
    """One value of a metric."""

    step: int
    epoch: int | None
    time: float | None
    """Unix time in seconds; None if the file does not hold it."""
    value: float


class ForeignRun(Struct):
    """Everything that one folder holds about a run."""

    folder: Path
    source: str
    """What wrote it: ``Lightning's CSVLogger`` or ``TensorBoard``."""
    points: dict[str, list[ForeignPoint]] = field(default_factory=dict)
    """Values of each metric, in order of their steps."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    began_at: float = 0.0
    ended_at: float = 0.0
    has_times: bool = False
    """True if the values have times, so that ``began_at`` and ``ended_at`` are those of training.

    Otherwise they are those of the files.
    """
    not_numbers: dict[str, int] = field(default_factory=dict)
    """Number of values of each column that are no numbers and were left out."""


def find_foreign_runs(path: Path) -> list[Path]:
    """Return each folder in ``path`` that holds metrics, or the one of the file ``path``.

    Raise ``ProblemError`` if there is none.
    """
    if path.is_file() and (path.name == CSV_NAME or _is_event_file(path.name)):
        return [path.parent]
    folders, wandb = [], False
    for folder, _, names in os.walk(path):
        if CSV_NAME in names or any(map(_is_event_file, names)):
            folders.append(Path(folder))
        wandb = wandb or any(name.endswith(".wandb") for name in names)
    if folders:
        return sorted(folders)
    if wandb or path.suffix == ".wandb":
        raise ProblemError.of(
            where=str(path),
            what="runs of W&B cannot be imported: their files have no public format.",
            remedy="Upload them with `wandb sync`, or log to a CSVLogger as well.",
        )
    raise ProblemError.of(
        where=str(path),
        what="there is no such file or folder."
        if not path.exists()
        else f"there is neither {CSV_NAME} of a CSVLogger nor a TensorBoard event file in it.",
        remedy="Give the folder of a logger, such as lightning_logs/version_0.",
    )


def read_foreign_run(folder: Path) -> ForeignRun:
    """Read the metrics of a folder. Raise ``ProblemError`` if that is not possible."""
    try:
        run = _read_csv(folder) if (folder / CSV_NAME).is_file() else _read_events(folder)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProblemError.of(
            where=str(folder),
            what=f"its metrics cannot be read ({getattr(error, 'strerror', None) or error}).",
            remedy="Restore the file from a backup.",
        ) from error
    if not run.points:
        raise ProblemError.of(
            where=str(folder), what="it holds no values.", remedy="Give another folder."
        )
    for points in run.points.values():
        points.sort(key=lambda point: point.step)
    run.hyperparameters = _hyperparameters(folder / "hparams.yaml")
    return run


def _is_event_file(name: str) -> bool:
    return "tfevents" in name and not name.startswith(".")


def _read_csv(folder: Path) -> ForeignRun:
    run = ForeignRun(folder, "Lightning's CSVLogger")
    path = folder / CSV_NAME
    run.began_at = run.ended_at = path.stat().st_mtime
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(_lines(file))):
            step = _whole(row.get("step"))
            place = (number if step is None else step, _whole(row.get(_EPOCH)))
            for name, text in row.items():
                # A row that is longer than the header has a part without a name.
                if name in (None, "step", _EPOCH) or not text:
                    continue
                value = _number(text)
                if value is None:
                    run.not_numbers[name] = run.not_numbers.get(name, 0) + 1
                else:
                    run.points.setdefault(name, []).append(ForeignPoint(*place, None, value))
    return run


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines. Raise ``csv.Error`` for one that could fill the memory."""
    while line := file.readline(_MOST_CHARACTERS):
        if len(line) == _MOST_CHARACTERS:
            raise csv.Error(f"a line has more than {_MOST_CHARACTERS:,} characters")
        yield line


def _whole(text: str | None) -> int | None:
    """Return a step or an epoch; None if it is not a number that a history can hold."""
    number = _number(text)
    return None if number is None or not abs(number) < _LEAST_TOO_LARGE else int(number)


def _number(text: str | None) -> float | None:
    if text in ("True", "False"):
        return float(text == "True")
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _read_events(folder: Path) -> ForeignRun:
    for path in filter(lambda path: _is_event_file(path.name), folder.iterdir()):
        if not is_regular_or_absent(path):  # TensorBoard would wait for a pipe for ever
            raise OSError(errno.EINVAL, f"{path.name!r} is not a regular file")
    run = ForeignRun(folder, "TensorBoard", has_times=True)
    scalars = dict(_scalars(folder))
    epochs = {step: int(value) for step, _, value in scalars.pop(_EPOCH, []) if value >= 0}
    for tag, values in scalars.items():
        run.points[tag] = [
            ForeignPoint(step, epochs.get(step), time, value) for step, time, value in values
        ]
    times = [point.time for points in run.points.values() for point in points if point.time]
    run.began_at, run.ended_at = min(times, default=0.0), max(times, default=0.0)
    return run


def _scalars(folder: Path) -> Iterator[tuple[str, list[tuple[int, float, float]]]]:
    """Yield each scalar of the event files of a folder with its (step, time, value)."""
    package = "tensorboard.backend.event_processing.event_accumulator"
    library = load_library(package, "tensorboard", str(folder))
    tensors = load_library("tensorboard.util.tensor_util", "tensorboard", str(folder))
    # 0 keeps all. Of pictures and histograms nothing is needed.
    kept = {"images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1}
    events = library.EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "tensors": 0, **kept}
    )
    events.Reload()
    tags: Mapping[str, list[str]] = events.Tags()
    for tag in tags["scalars"]:
        yield tag, [(e.step, e.wall_time, e.value) for e in events.Scalars(tag)]
    for tag in tags["tensors"]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            yield (
                tag,
                [
                    (e.step, e.wall_time, float(tensors.make_ndarray(e.tensor_proto).item()))
                    for e in events.Tensors(tag)
                ],
            )


def _hyperparameters(path: Path) -> dict[str, Any]:
    """Return what ``save_hyperparameters`` wrote; empty if it holds more than plain values."""
    try:
        text = read_regular(path).decode()
        check_size(text)
        document = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {str(k): v for k, v in document.items()} if isinstance(document, dict) else {}
