"""Runs of other tools become runs in the list, with equal values."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ltui.app.cli import main
from ltui.app.launch.past_run import read_past_run
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir, list_runs
from tests.required import required
from tests.store.event_files import expected_events
from tests.store.test_export_formats import make_run

pytest.importorskip("tensorboard")
SCRIPT = Path(__file__).with_name("logged_by_lightning.py")
Values = dict[str, list[tuple[int, str]]]
"""Steps and values (as text, so that NaN equals NaN) of each metric."""


def _values(run: RunDir) -> Values:
    values: Values = defaultdict(list)
    with RunStore(run) as store:
        for row in store.export(store.metric_names()):
            values[row.metric].append(
                (row.step, repr(math.nan if row.value is None else row.value))
            )
    return dict(values)


def _import(home: Path, *words: str) -> list[RunDir]:
    assert main(["import", *words]) == 0
    return sorted(list_runs(home), key=lambda run: run.id)


def _given(recorded: list[list], precision: Callable[[float], float]) -> Values:
    values: Values = defaultdict(list)
    for name, step, value in recorded:
        if name != "epoch":
            values[name].append((step, repr(precision(value))))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in values.items()}


@pytest.mark.slow
def test_runs_of_lightnings_own_loggers_are_equal(private_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    argv = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    recorded = json.loads(done.stdout.strip().splitlines()[-1])
    assert {name for name, _, _ in recorded} == {"train/loss", "val/loss", "late metric", "epoch"}
    board, table = _import(private_home, str(folder))
    assert (board.id[:-5], table.id[:-5]) == ("board-version_0", "csv-version_0")
    assert _values(table) == _given(recorded, float)
    assert "nan" in repr(_values(table))
    assert "inf" in repr(_values(table))
    from_board = _values(board)
    from_board.pop("hp_metric", None)
    assert from_board == _given(recorded, lambda value: float(np.float32(value)))
    with RunStore(board) as store:
        rows = list(store.export(["train/loss"]))
        assert [row.epoch for row in rows] == [1] * 4 + [2] * 4
        times = [row.time or 0.0 for row in rows]
        assert times == sorted(times)
        assert times[0] > 1.6e9
    with RunStore(table) as store:
        assert {row.time for row in store.export(["train/loss"])} == {None}
        kinds = {event.kind: event.data for event in store.events()}
        assert kinds["hyperparameters"]["values"] == {"width": 3}


def _table(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(text)
    return folder


def test_an_imported_run_is_an_ended_run_like_any_other(
    private_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _table(tmp_path / "logs" / "version_7", "epoch,loss,step\n0,2.5,0\n,1.5,1\n1,nan,2\n")
    (run,) = _import(private_home, str(folder))
    printed, note = capsys.readouterr()
    assert "values of 1 metric, imported from" in printed
    assert "Lightning's loggers count them from 0, ltui from 1." in note
    snapshot = resolve_snapshot(run)
    assert (snapshot.state, snapshot.detail) == (
        RunState.FINISHED,
        "imported from Lightning's CSVLogger",
    )
    assert (snapshot.global_step, snapshot.epoch) == (2, 1)
    loss = snapshot.metrics["loss"]
    assert (loss.best_min, loss.best_max, loss.step) == (1.5, 2.5, 2)
    assert read_labels(run).tags == ("imported",)
    with RunStore(run) as store:
        assert list(store.curve("loss").steps) == [0, 1, 2]
    capsys.readouterr()
    for command in (["show", run.id], ["runs"], ["export", run.id]):
        assert main(command) == 0, command
    text = capsys.readouterr().out
    assert "imported from Lightning's CSVLogger" in text
    assert "loss,0,1,,0,2.5,,,,1" in text
    assert main(["logs", run.id]) == 2
    assert "The run was imported: ltui has only its metrics." in capsys.readouterr().err
    with pytest.raises(ProblemError, match="does not know the program"):
        read_past_run(run)
    for command in (["resume", run.id], ["resume", run.id, "--set", "trainer.max_epochs=3"]):
        assert main(command) == 2
    assert main(["delete", run.id]) == 0


def test_a_long_table_keeps_every_value(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than what a history keeps of other runs, and than what is written at once."""
    monkeypatch.setitem(required(StoreWriter.__init__.__kwdefaults__), "keep_rows", 1000)
    monkeypatch.setattr("ltui.training.lifecycle.import_run._BATCH", 400)
    rows = "".join(f"{step},{step / 7!r}\n" for step in range(5000))
    (run,) = _import(private_home, str(_table(tmp_path / "long", f"step,x\n{rows}")))
    with RunStore(run) as store:
        exported = list(store.export(["x"]))
    assert [row.value for row in exported] == [step / 7 for step in range(5000)]


def test_event_files_of_an_exported_run_are_imported_with_equal_values(
    private_home: Path, tmp_path: Path
) -> None:
    run = make_run(private_home, "owl-0001")
    assert main(["export", run.id, "--to", "tensorboard", "-o", str(tmp_path / "events")]) == 0
    _import(private_home, str(tmp_path / "events" / run.id))
    imported = {other.id: _values(other) for other in list_runs(private_home) if other != run}
    expected = [
        {
            name: [(step, repr(value)) for step, _, value in scalars]
            for name, scalars in expected_events(run, rank).items()
        }
        for rank in (0, 1)
    ]
    assert sorted(imported.values(), key=len, reverse=True) == expected


DEEP = "/".join("x" * 2000)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (f"step,epoch,x\n{2**63},1e300,0.5\n1,1,0.25\n", {"x": [(0, "0.5"), (1, "0.25")]}),
        (f"step,{DEEP}\n1,2\n", {DEEP: [(1, "2.0")]}),
    ],
    ids=["a step that no history can hold is the number of its row", "a name that nests deeply"],
)
def test_unusual_tables_are_imported(
    private_home: Path, tmp_path: Path, text: str, values: Values
) -> None:
    (run,) = _import(private_home, str(_table(tmp_path / "odd", text)))
    assert _values(run) == values


def test_what_is_no_number_is_left_out_and_told(
    private_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'step,ok,"bad\x1b[31m",word\n1,1,True,hello\n2,2\n3,3,False,x,7,8\n'
    (run,) = _import(private_home, str(_table(tmp_path / "odd", text)), "--name", "mine")
    assert run.id.startswith("mine-")
    assert _values(run) == {
        "ok": [(1, "1.0"), (2, "2.0"), (3, "3.0")],
        "bad\x1b[31m": [(1, "1.0"), (3, "0.0")],
    }
    captured = capsys.readouterr()
    assert "2 values of word are not numbers" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_bad_folders_are_told_and_leave_nothing(
    private_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run-1.wandb").write_bytes(b"x")
    header = _table(tmp_path / "header", "step,loss\n")
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    good = _table(tmp_path / "good", "step,loss\n1,1\n")
    paths = [empty, tmp_path / "wandb", header, binary, tmp_path / "nowhere", good]
    assert main(["import", *map(str, paths)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[0] for line in lines] == [str(path) for path in paths[:-1]]
    assert "neither metrics.csv" in lines[0]
    assert "W&B cannot be imported" in lines[1]
    assert "holds no values" in lines[2]
    assert "cannot be read" in lines[3]
    assert "there is no such file or folder" in lines[4]
    assert [run.id[:-5] for run in list_runs(private_home)] == ["good"], "the good one is imported"
    assert len(list((private_home / "runs").iterdir())) == 1


def _zeros(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def _events(body: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "events.out.tfevents.1.host").write_bytes(body)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: (folder / "metrics.csv").mkdir(),
        lambda folder: os.mkfifo(folder / "metrics.csv"),
        lambda folder: (folder / "metrics.csv").symlink_to("/dev/zero"),
        lambda folder: (folder / "metrics.csv").write_text("step,loss\n1," + "9" * 200_000),
        lambda folder: (folder / "metrics.csv").write_text("step,loss\n\x1b]0;evil\x07,\x1b[2J\n"),
        lambda folder: (folder / "metrics.csv").write_text('{"step": [[1]], "loss": {}}\n'),
        lambda folder: _zeros(folder / "metrics.csv", 1 << 40),
        lambda folder: os.mkfifo(folder / "events.out.tfevents.1.host"),
        _events(b"\xff" * 4096),
        _events(b"\0" * 4096),
        _events(b"\x1b]0;evil\x07" * 400),
    ],
    ids=["folder", "FIFO", "device", "long number", "escape sequences", "other format", "huge",
         "FIFO of events", "ones", "zeros", "events with escape sequences"],
)  # fmt: skip
def test_a_hostile_file_is_refused_in_one_sentence(
    private_home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], object],
) -> None:
    folder = tmp_path / "hos\x1b[31mtile"
    folder.mkdir()
    write(folder)
    assert main(["import", str(folder)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert len(line) < 1000
    assert "\x1b" not in line
    assert captured.out == ""
    assert list_runs(private_home) == []
