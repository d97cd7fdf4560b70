"""Checkpoints of a live run: how long they took, and those that a script has saved."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import RunSnapshot, RunState, snapshot_from_json
from ltui.training.store.run_checkpoints import CHECK_S, CheckpointCatalog, ScriptCheckpoints
from tests.store.histories import snapshot


def report(path: Path, step: int, **fields: object) -> dict[str, object]:
    return {"path": str(path), "global_step": step, "epoch": 0, "t": 10.0 + step, **fields}


def test_a_newer_best_takes_the_mark_and_deleted_files_go(tmp_path: Path) -> None:
    first, second, last = (tmp_path / f"{n}.ckpt" for n in ("first", "second", "last"))
    for file in (first, second, last):
        file.write_bytes(b"x" * 10)
    checkpoints = ScriptCheckpoints()
    checkpoints.add(report(first, 1, metric="val/loss", value=0.5, best=True))
    checkpoints.add(report(second, 2, metric="val/loss", value=0.25, best=True))
    checkpoints.add(report(last, 2, last=True))
    existing = checkpoints.existing(0.0)
    assert [(Path(c.path).name, c.reason, c.size_bytes) for c in existing] == [
        ("first.ckpt", "val/loss = 0.5", 10),
        ("second.ckpt", "best by val/loss = 0.25", 10),
        ("last.ckpt", "last", 10),
    ]
    first.unlink()
    assert len(checkpoints.existing(1.0)) == 3
    assert len(checkpoints.existing(CHECK_S)) == 2


def test_what_was_reported_before_is_kept_by_the_next_supervisor(tmp_path: Path) -> None:
    file = tmp_path / "own.ckpt"
    file.write_bytes(b"x")
    checkpoints = ScriptCheckpoints()
    checkpoints.add(report(file, 7))
    checkpoints.add({**report(file, 8), "path": "s3://bucket/own.ckpt"})
    run = RunSnapshot(id="a", name="a", state=RunState.RUNNING)
    run = replace(run, script_checkpoints=checkpoints.existing(0.0))
    again = ScriptCheckpoints(snapshot_from_json(to_json(run)))
    assert again.existing(0.0) == run.script_checkpoints
    assert [c.global_step for c in again.existing(0.0)] == [7, 8]


def test_a_report_that_is_damaged_is_passed_over() -> None:
    checkpoints = ScriptCheckpoints()
    checkpoints.add({"path": None})
    checkpoints.add({})
    assert checkpoints.existing(0.0) == ()


def test_the_last_times_are_kept_over_attempts(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(tmp_path)
    assert not catalog.seconds
    for seconds in (90.0, 1, None, 2.5):
        catalog.saved(seconds)
    assert catalog.seconds == (90.0, 1.0, 2.5)
    resumed = CheckpointCatalog(tmp_path, snapshot(checkpoint_seconds=catalog.seconds))
    resumed.saved(3.0)
    assert resumed.seconds == (1.0, 2.5, 3.0), "a single slow one is forgotten"
