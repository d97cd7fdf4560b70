"""Files that are damaged, newer, shared or full of something else."""

from __future__ import annotations

import csv
import io
import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import Event, GpuSnapshot, Verdict
from ltui.training.store.database_schema import LAYOUT, StoreError
from ltui.training.store.export_files import write_csv, write_json
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from tests.store.histories import begin, run_dir, snapshot, steps, stored_rows, written


def _written(folder: Path, count: int = 500) -> Path:
    return written(folder, [steps(1, count)]).db_path


def test_a_newer_layout_is_refused_by_name(tmp_path: Path) -> None:
    path = _written(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    with pytest.raises(StoreError, match="written by a newer ltui"):
        RunStore(run_dir(tmp_path))
    with pytest.raises(StoreError, match="Upgrade ltui"):
        StoreWriter(path)


def test_a_history_without_later_columns_is_read_and_continued(tmp_path: Path) -> None:
    gpus = [GpuSnapshot(index=0, sampled_at=1.0, power_w=70.0, sm_activity=0.5)]
    logged = Batch(gpus=gpus, samples=[(0, 9, "val/loss", 1, 0, 1.0, 2.0)])
    path = written(tmp_path, [steps(1, 3), logged]).db_path
    columns = [f"samples DROP {name}" for name in ("n", "low", "high", "last", "first_step")]
    with closing(sqlite3.connect(path)) as db:
        for later in (*columns, "gpu_samples DROP sm_activity", "steps DROP transfer_s"):
            db.execute(f"ALTER TABLE {later}")
    with RunStore(run_dir(tmp_path)) as history:
        readings = history.gpu_history(0, last_s=9.0)
        assert (readings["power_w"].tolist(), str(readings["sm_activity"][0])) == ([70.0], "nan")
        assert len(history.curve("step/loss").steps) == 3
        assert math.isnan(history.last_steps(1)[0][StepField.TRANSFER_S])
        assert [(row.step, row.value) for row in history.export(["val/loss"])] == [(1, 2.0)]
        assert history.curve("val/loss").mean.tolist() == [2.0]
    with closing(StoreWriter(path)) as store:
        assert store.combined() == 0
        store.commit(1, Batch(gpus=[replace(gpus[0], sampled_at=2.0)]))
    with RunStore(run_dir(tmp_path)) as history:
        assert str(history.gpu_history(0, last_s=9.0)["sm_activity"].tolist()) == "[nan, 0.5]"


def _read_everything(folder: Path) -> None:
    with RunStore(run_dir(folder)) as store:
        store.snapshot()
        list(store.export(store.metric_names()))
        store.curve("train/loss")


@pytest.mark.parametrize("damage", ["header", "middle", "empty", "text"])
def test_damage_is_said_in_a_sentence(tmp_path: Path, damage: str) -> None:
    path = _written(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[:100] = b"x" * 100
    elif damage == "middle":
        data[4096:] = b"\xff" * (len(data) - 4096)
    else:
        data = bytearray(b"hello" if damage == "text" else b"")
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError) as caught:
        _read_everything(tmp_path)
    assert str(path) in str(caught.value)


def test_a_missing_history_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no history yet"):
        RunStore(run_dir(tmp_path))


def test_reading_goes_on_while_the_writer_is_in_the_middle(tmp_path: Path) -> None:
    path = _written(tmp_path)
    store = StoreWriter(path)
    store._connection.execute("BEGIN IMMEDIATE")
    store._connection.execute("DELETE FROM steps")
    with RunStore(run_dir(tmp_path)) as history:
        assert len(list(history.export(["train/loss"]))) == 500
    store._connection.execute("ROLLBACK")
    store.close()


def test_a_failed_commit_leaves_nothing_and_is_forgotten(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    batch = Batch(samples=[(0, 1, "new/name", 1, 0, 1.0, 1.0)], cursors={0: Cursor(2)})
    store._connection.execute("PRAGMA max_page_count = 1")
    many = [(0, seq, f"m{seq}" * 40, 1, 0, 1.0, 1.0) for seq in range(1000)]
    with pytest.raises(sqlite3.Error):
        store.commit(1, Batch(samples=[*many, *batch.samples]))
    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.commit(1, batch)
    assert store.cursors(1) == {0: Cursor(2)}
    store.close()
    with RunStore(run) as history:
        assert [row.value for row in history.export(["new/name"])] == [1.0]


def test_a_snapshot_of_another_type_is_text_all_the_same(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    store.commit(1, Batch(), snapshot(global_step=7))
    store._connection.execute("UPDATE snapshot SET document = x'7b7d'")
    assert isinstance(store.snapshot_document(), str)
    store.close()


def test_everything_else_comes_back(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    gpus = [
        GpuSnapshot(index=0, sampled_at=float(t), utilisation_percent=None if t == 2 else t)
        for t in range(4)
    ]
    for gpu in gpus:
        store.commit(1, Batch(gpus=[gpu]))
    data = {"path": "p", "value": float("nan")}
    event = Event(2.0, "checkpoint_saved", "saved", data, rank=1, seq=5)
    store.commit(1, Batch(events=[event, event], gaps=[(1, 9, 4, 3.0, "lapped")]))
    verdict = Verdict(kind="stall", level="stalled", cause="rank 1", culprits=(1,), began=1.0)
    store.write_verdict(1, verdict)
    store.write_verdict(1, replace(verdict, ended=9.0))
    store.commit(1, Batch(), snapshot(global_step=7))
    store.close()
    with RunStore(run) as history:
        (found,) = history.events()
        assert (found.rank, found.kind, found.data) == (
            1, "checkpoint_saved", {"path": "p", "value": "NaN"},
        )  # fmt: skip
        assert history.events(after_id=found.id) == []
        assert [gap["missed"] for gap in stored_rows(run, "gaps")] == [4]
        assert [(v.culprits, v.ended) for v in history.verdicts()] == [((1,), 9.0)]
        readings = history.gpu_history(0, last_s=2.0)
        assert list(readings["t"]) == [1.0, 2.0, 3.0]
        assert str(readings["utilisation_percent"][1]) == "nan"
        assert history.snapshot().global_step == 7


def test_export_as_csv_and_json(tmp_path: Path) -> None:
    _written(tmp_path, 3)
    with RunStore(run_dir(tmp_path)) as history:
        names = ["train/loss"]
        table, document = io.StringIO(), io.StringIO()
        write_csv({"owl": history.export(names)}, table)
        write_json({"owl": history.export(names)}, document)
        empty = io.StringIO()
        write_json({"owl": history.export([])}, empty)
    rows = list(csv.DictReader(io.StringIO(table.getvalue())))
    assert list(rows[0])[:6] == ["metric", "step", "epoch", "time", "rank", "value"]
    assert list(rows[0])[6:] == ["first_step", "min", "max", "count"]
    loaded = json.loads(document.getvalue())
    assert list(loaded[0]) == list(rows[0])
    assert {(r["first_step"], r["min"], r["max"], r["count"]) for r in loaded} == {
        (None, None, None, 1)
    }
    assert [float(r["value"]) for r in rows] == [r["value"] for r in loaded] == [1.0, 2.0, 3.0]
    assert json.loads(empty.getvalue()) == []


def test_an_export_reports_a_damaged_page(tmp_path: Path) -> None:
    path = _written(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (size,) = db.execute("PRAGMA page_size").fetchone()
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'steps'"
        (page,) = db.execute(query).fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * 100)
    with RunStore(run_dir(tmp_path)) as history, pytest.raises(StoreError, match="damaged"):
        list(history.export(["train/loss"]))
