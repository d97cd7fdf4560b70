"""Exports read back by the libraries that own the formats."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ltui.app.cli import main
from ltui.training.config.run_spec import RunSpec
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import load_library
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.history_queries import ExportRow
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, Cursor, Sample, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.ltui_command import run_ltui
from tests.store.event_files import assert_complete, read_events, single
from tests.store.histories import begin, snapshot, steps

STRANGE_NAME = "bell\x07 and\nnewline\tü"
LATE_STEP = 12


def make_run(home: Path, run_id: str) -> RunDir:
    """A run of two ranks and two attempts; the second one repeats the steps after 8."""
    run = RunDir(home / "runs" / run_id)
    run.path.mkdir(parents=True)
    run.write_spec(RunSpec(id=run_id, name=run_id[:-5], created_at=50.0, cwd="/", python="python"))
    store = StoreWriter(run.db_path)
    begin(store)
    for rank in (0, 1):
        store.commit(1, steps(1, 10, rank=rank, factor=0.1 + rank))
    store.commit(1, samples(1, 10))
    begin(store, 2, resumed_step=8)
    store.commit(2, steps(9, 15, factor=0.3))
    store.commit(2, samples(9, 15), snapshot(id=run_id, name=run_id[:-5]))
    store.close()
    return run


def samples(first: int, last: int) -> Batch:
    special = {3: math.nan, 4: math.inf, 5: -math.inf}
    rows: list[Sample] = []
    for step in range(first, last + 1):
        rows.append((0, step * 3, "val/acc", step, 0, 100.25 + step, special.get(step, step / 8)))
        rows.append((0, step * 3 + 1, STRANGE_NAME, step, 0, 100.5 + step, -step))
        if step >= LATE_STEP:
            rows.append((0, step * 3 + 2, "late", step, 1, 100.75 + step, 1e-12 * step))
    return Batch(samples=rows, cursors={0: Cursor(last * 3 + 3)})


def stored_rows(run: RunDir) -> list[ExportRow]:
    with RunStore(run) as store:
        return list(store.export(store.metric_names()))


@pytest.fixture
def runs(private_home: Path) -> list[RunDir]:
    return [make_run(private_home, f"{name}-0001") for name in ("owl", "fox")]


def test_tensorboard_reads_every_value_step_and_time(runs: list[RunDir], tmp_path: Path) -> None:
    folder = tmp_path / "events"
    command = ["export", *(run.id for run in runs), "--to", "tensorboard", "-o", str(folder)]
    assert main(command) == 0
    assert main(command) == 0, "a second export replaces the first"
    for run in runs:
        names = {row.metric for row in stored_rows(run)}
        assert names == {"late", STRANGE_NAME, "train/loss", "val/acc"}
        assert_complete(run, folder / run.id)
    loss = read_events(folder / runs[0].id)["train/loss"]
    assert [step for step, _, _ in loss] == list(range(1, 16))
    # The second attempt replaces the steps that it repeats.
    assert [loss[7][2], loss[8][2]] == [single(0.1 * 8), single(0.3 * 9)]


def test_a_file_for_each_of_many_ranks_stays_closed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    # A process of its own, because that of the tests may have more files open than the limit.
    script = """
import resource, sys
from pathlib import Path
from ltui.training.store.export_files import export_events
from ltui.training.store.history_queries import ExportRow
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
rows = [ExportRow("a", step, 0, 1.0, rank, 2.0) for step in (1, 2) for rank in range(300)]
export_events(rows, Path(sys.argv[1]), 50.0)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [step for step, _, _ in read_events(tmp_path / "rank-299")["a"]] == [1, 2]


def test_parquet_is_read_back_equal(runs: list[RunDir], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "both.parquet"
    assert main(["export", *(run.id for run in runs), "--to", "parquet", "-o", str(path)]) == 0
    table: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    expected = [(run.id, row) for run in runs for row in stored_rows(run)]
    assert len(table) == len(expected)
    for found, (run_id, row) in zip(table, expected, strict=True):
        assert (found["run"], found["metric"]) == (run_id, row.metric)
        place = (row.step, row.epoch, row.time, row.rank)
        assert (found["step"], found["epoch"], found["time"], found["rank"]) == place
        value = math.nan if row.value is None else row.value
        assert repr(found["value"]) == repr(float(value))
        assert (found["first_step"], found["count"]) == (None, 1)
    assert {repr(row["value"]) for row in table} >= {"nan", "inf", "-inf"}


def test_the_table_of_several_runs_names_them(runs: list[RunDir], tmp_path: Path) -> None:
    path = tmp_path / "both.csv"
    assert main(["export", *(run.id for run in runs), "-o", str(path), "--metric", "late"]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [run.id for run in runs for _ in range(LATE_STEP, 16)]
    path = tmp_path / "one.json"
    assert main(["export", runs[0].id, "-o", str(path), "--to", "json"]) == 0
    document = json.loads(path.read_text())
    assert "run" not in document[0]
    assert {row["metric"] for row in document} >= {STRANGE_NAME, "late"}


def test_a_format_that_cannot_be_printed_is_refused(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("parquet", "tensorboard"):
        assert main(["export", runs[0].id, "--to", name]) == 2
        assert f"--to {name}: this format cannot be printed. Name a f" in capsys.readouterr().err


def test_every_run_that_is_missing_is_named(
    runs: list[RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    assert main(["export", "nobody", runs[0].id, "nothing", "-o", str(path)]) == 2
    error = capsys.readouterr().err
    assert "nobody: there is no such run" in error
    assert "nothing: there is no such run" in error
    assert not path.exists()


def test_a_library_that_is_missing_is_named_with_its_remedy() -> None:
    with pytest.raises(ProblemError, match=r"-m pip install 'pyarrow>="):
        load_library("not_installed_anywhere", "parquet", "--to parquet")


def test_an_export_without_tensorboard_leaves_no_folder(
    runs: list[RunDir],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    folder = tmp_path / "events"
    assert main(["export", runs[0].id, "--to", "tensorboard", "-o", str(folder)]) == 2
    assert "-m pip install 'tensorboard>=" in capsys.readouterr().err
    assert not folder.exists()


def test_following_an_ended_run_writes_all_of_it_and_ends(
    runs: list[RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    command = ["export", runs[0].id, "--to", "tensorboard", "--follow", "-o", str(tmp_path / "m")]
    environment = {**os.environ, "LTUI_HOME": str(runs[0].home)}
    # A process of its own, because the priority of this one could not be raised again.
    with closing(StoreWriter(runs[0].db_path)) as store:
        store.write_snapshot(snapshot(id=runs[0].id, name="owl", state=RunState.FINISHED))
    run_ltui(*command, environment=environment, code=0)
    assert len(read_events(tmp_path / "m" / runs[0].id)["train/loss"]) == 15
    assert main(["export", runs[0].id, "--follow"]) == 2
    assert "--follow: only the event files of one run" in capsys.readouterr().err
