"""Checkpoints of a run: which are whole, which is resumed from, and those that a script saves."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.resume_run import find_start_checkpoint
from ltui.training.problem import ProblemError
from ltui.training.shared.checkpoint_files import (
    checkpoint_name,
    partial_path,
    publish_checkpoint,
    rank_file,
)
from ltui.training.state.run_snapshot import snapshot_from_json
from ltui.training.store.run_checkpoints import (
    CHECK_S,
    CheckpointCatalog,
    ScriptCheckpoints,
    checkpoint_to_resume,
    choose_checkpoint,
    furthest_checkpoint,
    list_checkpoints,
    verify,
)
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.store.histories import checkpoint, snapshot


def test_only_whole_checkpoints_are_resumed_from(tmp_path: Path) -> None:
    assert checkpoint_to_resume(tmp_path / "none") is None
    checkpoint(tmp_path, 10, 1.0)
    cut = checkpoint(tmp_path, 30, 3.0)
    cut.write_bytes(b"wei")
    flipped = checkpoint(tmp_path, 20, 2.0)
    flipped.write_bytes(b"wxights")
    (tmp_path / "step-00000040-stop.ckpt").write_bytes(b"no manifest")
    Path(f"{checkpoint(tmp_path, 50, 5.0)}.json").write_text("{")
    found = {info.global_step: info.ok for info in list_checkpoints(tmp_path)}
    assert found == {0: False, 10: None, 20: None, 30: False}
    assert [verify(info).ok for info in list_checkpoints(tmp_path)] == [False, True, False, False]
    best = required(checkpoint_to_resume(tmp_path))
    assert (best.global_step, best.ok) == (10, True)


@pytest.mark.parametrize("name", ["a\0b", "folder", "pipe"])
def test_a_manifest_that_names_no_regular_file_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / "step-00000010-stop.ckpt" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "step-00000010-stop.ckpt" / "pipe")
    files = {name: {"sha256": "0", "size_bytes": 0}}
    manifest = json.dumps({"global_step": 10, "saved_at": 1.0, "files": files})
    (tmp_path / "step-00000010-stop.ckpt.json").write_text(manifest)
    (info,) = list_checkpoints(tmp_path)
    assert verify(info).ok is False
    assert checkpoint_to_resume(tmp_path) is None


def test_the_last_saved_counts_not_the_furthest(tmp_path: Path) -> None:
    checkpoint(tmp_path, 500, 1.0)
    checkpoint(tmp_path, 120, 2.0)
    assert required(checkpoint_to_resume(tmp_path)).global_step == 120


# The checkpoints that ``RUN`` and ``RUN:STEP`` name, as real ranks publish them.


def _published(folder: Path, step: int, ranks: int = 0, **facts: Any) -> Path:
    path = folder / checkpoint_name(step, "periodic")
    partial_path(path).write_bytes(b"weights" * step)
    for rank in range(ranks):
        partial_path(rank_file(path, rank)).write_bytes(b"rank")
    publish_checkpoint(partial_path(path), path, ranks, global_step=step, attempt=1, fit=1, **facts)
    return path


@pytest.fixture
def source(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 10 and 20, the later one damaged."""
    run_dir = RunDir(tmp_path / "runs" / "brave-owl-3f2a")
    run_dir.checkpoints_dir.mkdir(parents=True)
    spec = RunSpec(id=run_dir.id, name="brave-owl", created_at=1.0, cwd="/", python="python3")
    run_dir.write_spec(spec)
    for step in (10, 20):
        path = _published(run_dir.checkpoints_dir, step, 1, epoch=0, reason="periodic")
    path.write_bytes(b"WEIGHTS" * 20)
    return run_dir


def test_at_once_what_is_there_and_thoroughly_what_is_whole(source: RunDir) -> None:
    home = source.home
    for text in ("brave-owl", "last", "brave-owl-3f2a:20"):
        run_dir, info = find_start_checkpoint(home, text, verified=False)
        assert (run_dir, info.global_step) == (source, 20)
    for text in ("brave-owl", "brave-owl:10"):
        assert find_start_checkpoint(home, text)[1].global_step == 10
    with pytest.raises(ProblemError, match=r"no complete checkpoint of step 20"):
        find_start_checkpoint(home, "brave-owl:20")


@pytest.mark.parametrize("verified", [False, True])
def test_what_is_not_there_is_said(source: RunDir, verified: bool) -> None:
    find = partial(find_start_checkpoint, verified=verified)
    with pytest.raises(ProblemError, match=r"of step 7\. There are checkpoints of steps 10, 20"):
        find(source.home, "brave-owl:7")
    with pytest.raises(ProblemError, match="Did you mean brave-owl-3f2a"):
        find(source.home, "brave-howl")
    for path in source.checkpoints_dir.iterdir():
        path.unlink()
    with pytest.raises(ProblemError, match="no complete checkpoint"):
        find(source.home, "brave-owl")


def test_a_checkpoint_after_the_first_nan_is_never_chosen(tmp_path: Path) -> None:
    for step, weights in ((10, None), (20, "finite"), (30, "finite"), (40, "NaN"), (50, "inf")):
        facts: dict[str, Any] = {} if weights is None else {"weights": weights}
        _published(tmp_path, step, **facts)
    for since, step in ((None, 30), (30, 30), (29, 20), (20, 20), (19, 10), (11, 10)):
        taken = required(choose_checkpoint(tmp_path, since).taken)
        assert taken.global_step == step
        assert furthest_checkpoint(tmp_path, since) == replace(taken, ok=None)
    none = choose_checkpoint(tmp_path, 10)
    assert none.taken is None
    assert none.why_none() == (
        "there is no checkpoint before the NaN (step-00000050-periodic.ckpt has inf weights; "
        "step-00000040-periodic.ckpt has NaN weights; step-00000030-periodic.ckpt is from after "
        "the first NaN loss (step 10); and 2 more)"
    )


# Checkpoints that a script has saved itself, and how long saving takes.


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
    assert [len(checkpoints.existing(now_s)) for now_s in (1.0, CHECK_S)] == [3, 2]


def test_reports_are_kept_by_the_next_supervisor_and_damaged_ones_passed_over(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.ckpt"
    file.write_bytes(b"x")
    checkpoints = ScriptCheckpoints()
    for damaged in ({"path": None}, {}):
        checkpoints.add(damaged)
    checkpoints.add(report(file, 7))
    checkpoints.add({**report(file, 8), "path": "s3://bucket/own.ckpt"})
    run = snapshot(script_checkpoints=checkpoints.existing(0.0))
    again = ScriptCheckpoints(snapshot_from_json(to_json(run)))
    assert again.existing(0.0) == run.script_checkpoints
    assert [c.global_step for c in again.existing(0.0)] == [7, 8]


def test_the_last_times_are_kept_over_attempts(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(tmp_path)
    assert not catalog.seconds
    for seconds in (90.0, 1, None, 2.5):
        catalog.saved(seconds)
    assert catalog.seconds == (90.0, 1.0, 2.5)
    resumed = CheckpointCatalog(tmp_path, snapshot(checkpoint_seconds=catalog.seconds))
    resumed.saved(3.0)
    assert resumed.seconds == (1.0, 2.5, 3.0), "a single slow one is forgotten"
