"""The record of past snapshots: what is read equals what was written, also of damaged files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.past.reader import PastReader, documents_of, record_files
from ltui.training.store.past.snapshots import FRAME, MAGIC, document_of, frame
from ltui.training.store.past.writer import PastWriter
from tests.store.past_runs import BEGAN, snapshots


def written(folder: Path, run: list[RunSnapshot], **options: object) -> PastReader:
    writer = PastWriter(folder, **options)  # type: ignore[arg-type]
    for number, snapshot in enumerate(run):
        writer.append(snapshot.taken_at or 0.0, document_of(snapshot, {"engine.log": number}))
    writer.close()
    reader = PastReader(folder)
    reader.refresh()
    return reader


def test_every_snapshot_is_found_as_it_was_written(tmp_path: Path):
    run = list(snapshots(3, 200))
    reader = written(tmp_path / "past", run)
    order = list(enumerate(run))
    random.Random(1).shuffle(order)
    for number, snapshot in order:
        moment = reader.at((snapshot.taken_at or 0.0) + 0.01)
        assert moment is not None
        assert (moment.at, moment.snapshot) == (snapshot.taken_at, snapshot)
        assert moment.log_sizes[-1] == (snapshot.taken_at, {"engine.log": number})
    assert reader.damage is None
    assert reader.bounds() == (BEGAN, run[-1].taken_at)


def test_snapshots_that_are_written_late_are_found_at_their_times(tmp_path: Path):
    run = list(snapshots(2, 8))
    reader = written(tmp_path, [run[0], run[5], run[2], run[3], run[6]])
    assert [reader.at((s.taken_at or 0.0) + 0.01) for s in run[2:4]] != []
    for snapshot in (run[2], run[3], run[5]):
        moment = reader.at((snapshot.taken_at or 0.0) + 0.01)
        assert moment is not None
        assert moment.snapshot == snapshot
        assert max(at for at, _ in moment.log_sizes) == moment.at


def test_nothing_is_invented_for_a_gap_but_an_end_lasts(tmp_path: Path):
    run = list(snapshots(2, 40))
    later = [replace(s, taken_at=(s.taken_at or 0.0) + 500, attempt=2) for s in run[:10]]
    reader = written(tmp_path, [*run[:20], *later])
    assert reader.at(BEGAN - 1) is None
    assert reader.at(BEGAN + 200) is None
    assert reader.nearest(BEGAN + 100) == run[19].taken_at
    assert reader.nearest(BEGAN + 499) == BEGAN + 500
    ended = written(tmp_path / "ended", [*run, *later])
    moment = ended.at(BEGAN + 200)
    assert moment is not None
    assert moment.snapshot.state is RunState.FINISHED


def test_an_old_record_is_thinned_within_its_size_and_keeps_events(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ltui.training.store.past.writer.FILE_BYTES", 20_000)
    run = list(snapshots(2, 3000, period_s=1.0))
    reader = written(tmp_path, run, budgets=(100_000, 60_000, 100_000))
    files = record_files(tmp_path)
    assert sum(file.size for file in files) < 280_000
    assert {file.level for file in files} == {0, 1, 2}
    bounds = reader.bounds()
    assert bounds is not None
    assert bounds[0] == BEGAN
    for at in range(0, 3000, 7):
        moment = reader.at(BEGAN + at)
        assert moment is not None
        assert moment.snapshot == run[round(moment.at - BEGAN)]
    stalled = next(s for s in run if s.verdicts)
    moment = reader.at(stalled.taken_at or 0.0)
    assert moment is not None
    assert moment.snapshot == stalled


@pytest.mark.parametrize("seed", range(20))
def test_damaged_and_cut_files_give_what_is_intact(tmp_path: Path, seed: int):
    run = list(snapshots(2, 130))
    written(tmp_path, run)
    path = record_files(tmp_path)[0].path
    noise = random.Random(seed)
    data = bytearray(path.read_bytes())
    if seed % 2:
        del data[noise.randrange(20, len(data)) :]
    else:
        data[noise.randrange(12, len(data))] ^= 0xFF
    path.write_bytes(bytes(data))
    reader = PastReader(tmp_path)
    reader.refresh()
    intact = [reader.at(s.taken_at or 0.0) for s in run]
    assert any(intact) or seed % 2 == 0
    assert all(m is None or m.snapshot in run for m in intact)
    assert (reader.damage is None) == bool(seed % 2)


def test_a_damaged_time_is_not_believed(tmp_path: Path):
    run = list(snapshots(2, 5))
    written(tmp_path, run)
    (file,) = record_files(tmp_path)
    data = bytearray(file.path.read_bytes())
    data[len(MAGIC) + FRAME.size - 5] ^= 0x01  # of the first snapshot
    file.path.write_bytes(bytes(data))
    reader = PastReader(tmp_path)
    reader.refresh()
    assert reader.bounds() is None
    assert reader.damage is not None


def test_files_of_anything_raise_nothing(tmp_path: Path):
    noise = random.Random(3)
    whole = frame(BEGAN, {"snapshot": {"id": 5}}, whole=True)
    bombs = [
        noise.randbytes(5000),
        b"",
        b"ltui past 1\n",
        b"ltui past 1\n" + frame(BEGAN, [1, {"snapshot": [7]}, []], whole=False),
        b"ltui past 1\n" + whole + frame(BEGAN + 1, [2, {}, [], 10**9], whole=False),
        b"ltui past 1\n" + frame(BEGAN, b"\0" * (200 << 20), whole=True),
        b"ltui past 1\n" + frame(float("nan"), {}, whole=True),
        b"ltui past 1\n" + frame(BEGAN, "text", whole=True) * 3,
    ]
    for number, data in enumerate(bombs):
        (tmp_path / f"{1000 + number}-0.past").write_bytes(data)
    (tmp_path / "9999-0.past").mkdir()
    reader = PastReader(tmp_path)
    reader.refresh()
    assert reader.at(BEGAN + 5) is None
    assert reader.damage is not None
    assert [list(documents_of(file.path)) for file in record_files(tmp_path)][1] == []
